# SPDX-License-Identifier: Apache-2.0
"""The flags of a run beside windows: do they go on from them, and with which arguments?

For an export the flags must be those of the training that captured the windows, in any layout. For
one rank, flags that cannot change a bit of the state get upstream's defaults (no logs, no profiles,
no overlap), and layers are built for a CPU; their state is the same.
"""

import argparse
import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from megatron.training import arguments as upstream

from megatron.moevement.arguments import add_arguments, config_from_args
from megatron.moevement.checking import (
    as_first_rank,
    fewest_ranks,
    in_words,
    judge,
    parser,
    validated,
)
from megatron.moevement.facts import Settings, UpstreamArguments
from megatron.moevement.job import identity, placing
from megatron.moevement.job.flags import INDIFFERENT, LAYOUT, MAY_CHANGE
from megatron.moevement.seams import without_gpu
from megatron.moevement.state.resharded_tensors import refuse_scale
from moevement_ext.config import RESTART
from moevement_ext.errors import UserError
from moevement_ext.memory.window import settings
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.settings import Layout
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
    differing = settings.differences(was, now).decisive
    return settings.first_lines(differing) or 'no recorded setting differs'


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
        raise UserError(in_words(error)) from error


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


class Answer(NamedTuple):
    """The predicted use of a window by a job."""

    loads: bool
    words: str
    """The window's use, or the reason against it."""


def answer(
    header: SlotHeader, flags: Sequence[str], ranks: int | None, root: Path, on_disk: bool
) -> Answer:
    """Predict whether a job would continue from a window of all its owners.

    `header` is slot 0 of any owner, `flags` are all flags of `pretrain_gpt.py`. With `ranks`
    None, the world size is that of the windows, or else the fewest ranks that the flags allow.
    `root` has the directory of the run, `on_disk` or in memory.
    """
    try:
        args = validated_for(flags, header, ranks)
    except UserError as error:
        return Answer(False, str(error))
    refused = judge(flags, args.world_size).refused
    if refused:
        return Answer(False, f'the job would not start: {"; ".join(refused)}')
    in_vocabulary_of(header, args)
    found = _of_training(header, vars(args))
    if not found.loads:
        return found
    config, run_id = config_from_args(args), run_id_of(header)
    called = identity.called(vars(args), config)
    if called != run_id:
        return Answer(
            False,
            f'the run is called {run_id}, and a start from here would be {called}: give '
            f'--sparse-ckpt-run-id {run_id}',
        )
    flag, searched = ('disk', config.disk) if on_disk else ('dir', config.dir)
    if searched is None or Path(searched).resolve() != root:
        return Answer(False, f'the start would not look there: give --sparse-ckpt-{flag} {root}')
    return found


def _of_training(header: SlotHeader, known: Settings) -> Answer:
    """The answer if the job looks for the window."""
    run_id = run_id_of(header)
    same_layout = identity.topology_identity(known) == header.topology
    if same_layout and identity.run_identity(known, run_id) == header.run:
        return Answer(True, 'as it is')
    if header.placed is None:
        return Answer(False, 'it records no layout, and is of another layout or training')
    if identity.training_identity(known, run_id) != header.placed.training:
        return Answer(False, f'it is of another training: {other_training(header, known)}')
    now = placing.layout_of(known)
    if now is None:
        return Answer(
            False, 'these flags shard weights beyond tensor parallelism; it is of another layout'
        )
    return _in_another_layout(header, header.placed.layout, now, known)


def _in_another_layout(header: SlotHeader, was: Layout, now: Layout, known: Settings) -> Answer:
    try:
        placing.refuse(
            was,
            now,
            interleaved=known['moe_mlp_glu_interleave_size'] is not None,
            own_data=known['dataloader_type'] == 'cyclic' and bool(known['data_sharding']),
        )
        if was.expert_tensor != now.expert_tensor:
            for record in header.records:
                refuse_scale(record.operator, record.part, record.tensor)
    except RefusedWindow as refusal:
        return Answer(False, str(refusal))
    if known['sparse_ckpt_elastic'] != RESTART:
        return Answer(
            False,
            f'it is of {was}, the job would be of {now}, and --sparse-ckpt-elastic {RESTART} is '
            'not given',
        )
    if header.window > 1 and known['sparse_ckpt_elastic_exact']:
        return Answer(
            False,
            f'--sparse-ckpt-elastic-exact: it has {header.window} slots, which only {was} can go '
            'on from exactly',
        )
    how = 'bit for bit' if header.window == 1 else 'equal up to rounding'
    return Answer(True, f'in another layout, {how}: it is of {was}, the job would be of {now}')
