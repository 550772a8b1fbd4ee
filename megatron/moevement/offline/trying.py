# SPDX-License-Identifier: Apache-2.0
"""Predicts whether a job with given flags would continue from windows, without starting it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.moevement.arguments import config_from_args
from megatron.moevement.checking import judge
from megatron.moevement.facts import Settings
from megatron.moevement.job import identity, placing
from megatron.moevement.offline.run_flags import (
    in_vocabulary_of,
    other_training,
    run_id_of,
    validated_for,
)
from megatron.moevement.state.resharded_tensors import refuse_scale
from moevement_ext.config import RESTART
from moevement_ext.errors import UserError
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.settings import Layout
from moevement_ext.memory.window.slot import SlotHeader


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
