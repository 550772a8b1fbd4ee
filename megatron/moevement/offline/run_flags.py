# SPDX-License-Identifier: Apache-2.0
"""Upstream's arguments from the flags of a run, for the run's layout and for one rank.

The flags must be those of the training that captured the windows, in any layout. For one rank,
flags that cannot change a bit of the state get upstream's defaults (no logs, no profiles, no
overlap), and layers are built for a CPU; their state is the same.
"""

import argparse
import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

import msgspec
from megatron.training import arguments as upstream

from megatron.moevement.arguments import add_arguments
from megatron.moevement.checking import as_first_rank, fewest_ranks, parser, told, validated
from megatron.moevement.facts import Settings, UpstreamArguments
from megatron.moevement.job import identity
from megatron.moevement.job.flags import INDIFFERENT, LAYOUT, MAY_CHANGE
from megatron.moevement.seams import without_gpu
from moevement_ext.errors import UserError
from moevement_ext.memory.window import settings
from moevement_ext.memory.window.slot import SlotHeader

_RUN_ID = '--sparse-ckpt-run-id'
_VOCABULARY = '--padded-vocab-size'
_SHARDED = 'use_distributed_optimizer'

# Settings of an export, in addition to those for a CPU.
_LEFT_OUT = {
    'moe_grouped_gemm': False,
    'ckpt_format': 'torch_dist',
    'dist_ckpt_optim_fully_reshardable': True,
    'rerun_mode': 'disabled',
    'sparse_ckpt': False,
    'sparse_ckpt_digest': None,
}


def of_training(flags: Sequence[str], header: SlotHeader) -> UpstreamArguments:
    """Upstream's arguments of the run, in the layout of the flags.

    `header` is of slot 0, which records the window's layout. Raises `UserError`, which names
    the flags, if they are wrong or belong to another training.
    """
    args = validated_for(flags, header)
    in_vocabulary_of(header, args)
    run_id = run_id_of(header)
    assert header.placed is not None
    if identity.training_identity(vars(args), run_id) != header.placed.training:
        raise UserError(
            'the flags belong to another training than the windows: '
            f'{other_training(header, vars(args))}. '
            'After -- give the flags that the run was launched with; the layout may differ.'
        )
    return args


def other_training(header: SlotHeader, known: Settings) -> str:
    """Differences in flags between this training and that of a window, ignoring layouts."""
    was, now = _captured(header), identity.run_settings(known, run_id_of(header))
    was, now = (msgspec.structs.replace(one, layout={}) for one in (was, now))
    return settings.told(settings.differences(was, now).decisive) or 'no recorded setting differs'


def run_id_of(header: SlotHeader) -> str:
    """The run's name in the header, which the directory's name need not contain."""
    return _captured(header).flags.get(_RUN_ID, '')


def in_vocabulary_of(header: SlotHeader, args: UpstreamArguments) -> None:
    """Set the size of the padded vocabulary, without opening the tokenizer."""
    text = _captured(header).flags.get(_VOCABULARY, '')
    args.padded_vocab_size = int(text) if text.isdecimal() else None


def validated_for(
    flags: Sequence[str], header: SlotHeader, ranks: int | None = None
) -> UpstreamArguments:
    """Validate the flags for a number of ranks.

    With `ranks` None: as many as captured the window, if the flags allow it, else the fewest.
    Raises `UserError` if upstream refuses the flags.
    """
    if ranks is None:
        ranks = fewest_ranks(vars(parser().parse_args(flags)))
        if header.placed is not None and header.placed.layout.ranks % ranks == 0:
            ranks = header.placed.layout.ranks
    try:
        return validated(flags, ranks)
    except (Exception, SystemExit) as error:
        raise UserError(told(error)) from error


def for_one_rank(flags: Sequence[str], run: UpstreamArguments, output: Path) -> UpstreamArguments:
    """Upstream's arguments for one rank, to save in `output`."""
    given = parser()
    with as_first_rank(flags, 1):
        args: UpstreamArguments = upstream.parse_args(add_arguments)
        known = {action.dest for action in given._actions}
        reset = INDIFFERENT | LAYOUT | MAY_CHANGE
        plain = sorted((reset & known) - {_SHARDED})
        vars(args).update({name: given.get_default(name) for name in plain})
        vars(args).update(without_gpu_settings(given), **_LEFT_OUT)
        args.padded_vocab_size = run.padded_vocab_size
        with contextlib.redirect_stdout(io.StringIO()):
            upstream.validate_args(args)
    args.save = str(output)
    return args


def without_gpu_settings(known: argparse.ArgumentParser) -> dict[str, object]:
    """Settings in which the flags for a machine without a GPU differ from upstream's defaults."""
    defaults = vars(known.parse_args([]))
    found = vars(known.parse_args(without_gpu.FLAGS.split()))
    return {name: value for name, value in found.items() if value != defaults[name]}


def _captured(header: SlotHeader) -> settings.RunSettings:
    return settings.decode(header.settings) if header.settings else settings.RunSettings()
