# SPDX-License-Identifier: Apache-2.0
"""The auxiliary state of a rank in another layout, assembled from the ranks of the previous layout.

Counters, schedules and positions are the same on all ranks. Each stream of random numbers belongs
to a stage, a tensor-parallel shard, or an expert shard. A stream that exists in both layouts
continues; a new stream starts as upstream seeds it at the start of a job. Parameter groups are
matched by their distinguishing settings, as their number depends on the layout.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from megatron.moevement.state.global_scalars import GlobalScalars, Reduced
from megatron.moevement.state.iteration_state import (
    WEIGHT_DECAY,
    IterationState,
    RngState,
    ScalerState,
    Setting,
)
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.settings import Layout, Seat

# Settings that identify a group in any layout; with several matches, also `is_expert_parallel`.
_OF_A_GROUP = ('wd_mult', 'lr_mult', 'is_decoupled_lr', 'default_config', 'optimizer')
# These also do, but after a start from a dense checkpoint they may differ from the flags.
_RATES = ('max_lr', 'min_lr', 'start_wd', 'end_wd', 'eps', 'betas')
_EXPERTS = 'is_expert_parallel'


class Streams(NamedTuple):
    """Owners whose random numbers a rank continues; None: no owner had this rank's stream."""

    stage: int | None
    """Owner of all generators except that of the experts."""
    experts: int | None
    """Owner of the generator of the experts."""


def streams_of(own: Seat, seats: Mapping[int, Seat], each_data_rank: bool) -> Streams:
    """Owners that have the streams of a rank.

    Data-parallel ranks share the streams of a stage, and the same data-parallel rank is preferred;
    but with `each_data_rank` they have separate ones (`--data-parallel-random-init`).
    """
    stage = {
        owner: (seat.data != own.data, seat.context != own.context, owner)
        for owner, seat in seats.items()
        if (seat.pipeline, seat.tensor) == (own.pipeline, own.tensor)
        and (seat.data == own.data or not each_data_rank)
    }
    experts = {
        owner: (seat.expert_data != own.expert_data, owner)
        for owner, seat in seats.items()
        if (seat.pipeline, seat.expert, seat.expert_tensor)
        == (own.pipeline, own.expert, own.expert_tensor)
    }
    return Streams(
        min(stage, key=lambda owner: stage[owner], default=None),
        min(experts, key=lambda owner: experts[owner], default=None),
    )


def text_of_streams(was: Layout, now: Layout) -> str:
    """Text for the log: which streams of random numbers continue, and which are seeded again."""
    anew = []
    for what, before, after in (
        ('stages', was.pipeline, now.pipeline),
        ('expert shards', was.expert, now.expert),
        ('tensor shards', was.tensor, now.tensor),
        ('tensor shards of experts', was.expert_tensor, now.expert_tensor),
    ):
        if after > before:
            anew.append(f'{what} {before} to {after - 1}')
    if not anew:
        return 'random numbers: all streams go on'
    return f'random numbers: those of {", ".join(anew)} are seeded again, the others go on'


def resharded(
    states: Mapping[int, IterationState],
    streams: Streams,
    experts_name: str,
    present: IterationState,
    reduced: Reduced,
) -> IterationState:
    """Assemble this rank's state from the owners' states; `present` is its state when built.

    Raises:
        RefusedWindow: owners contradict each other, or have parameter groups that cannot be told
            apart.
    """
    first = states[min(states)]
    for owner, state in states.items():
        if (state.iteration, state.consumed_train_samples, state.scheduler_steps) != (
            first.iteration,
            first.consumed_train_samples,
            first.scheduler_steps,
        ):
            raise RefusedWindow(
                f'rank {owner} is at iteration {state.iteration} and sample '
                f'{state.consumed_train_samples}, rank {min(states)} at {first.iteration} and '
                f'{first.consumed_train_samples}'
            )
    matched = [_matching(group, list(states.values())) for group in present.groups]
    return msgspec.structs.replace(
        first,
        rng=_random(states, streams, experts_name, present.rng),
        scalers=_scalers(list(states.values()), len(present.scalers)),
        scalars=_scalars([state.scalars for state in states.values()], reduced),
        groups=[
            {**{n: v for n, v in group.items() if n != WEIGHT_DECAY}, **found} if found else group
            for group, found in zip(present.groups, matched, strict=True)
        ],
        group_steps=[_steps(list(states.values()))] * len(present.groups),
    )


def _matching(
    group: Mapping[str, Setting], states: Sequence[IterationState]
) -> dict[str, Setting] | None:
    """The owners' group that `group` continues, preferably of the same kind of parameters."""
    known = [other for state in states for other in state.groups]
    found = _same(known, group, _OF_A_GROUP)
    found = _same(found, group, (_EXPERTS,)) or found
    found = _same(found, group, _RATES) or found
    if not found:
        return None
    settings = [{name: value for name, value in one.items() if name != _EXPERTS} for one in found]
    if any(other != settings[0] for other in settings):
        raise RefusedWindow(
            'parameter groups that differ only in their rates have other rates than the flags '
            'give, so they cannot be told apart in another layout'
        )
    return settings[0]


def _same(
    known: Sequence[dict[str, Setting]], group: Mapping[str, Setting], names: Sequence[str]
) -> list[dict[str, Setting]]:
    """Known groups that have the values of `group` under these names."""
    return [one for one in known if all(one.get(name) == group.get(name) for name in names)]


def _steps(states: Sequence[IterationState]) -> int | None:
    """Step count of all groups; a group that is empty on an owner may have none, or an old one."""
    steps = (step for state in states for step in state.group_steps)
    return max((step for step in steps if step is not None), default=None)


def _random(
    states: Mapping[int, IterationState], streams: Streams, experts_name: str, present: RngState
) -> RngState:
    stage = present if streams.stage is None else states[streams.stage].rng
    experts = present if streams.experts is None else states[streams.experts].rng
    tracker = {
        name: (experts if name == experts_name else stage).tracker.get(name, state)
        for name, state in present.tracker.items()
    }
    return msgspec.structs.replace(stage, tracker=tracker)


def _scalers(states: Sequence[IterationState], count: int) -> list[ScalerState]:
    """Loss scales of `count` optimizers."""
    known = [scaler for state in states for scaler in state.scalers]
    if not count or not known:
        return []
    if any(scaler != known[0] for scaler in known):
        raise RefusedWindow(
            f'optimizers have loss scales {sorted({scaler.scale for scaler in known})}, and '
            'another layout chains other optimizers'
        )
    return [known[0]] * count


def _scalars(known: Sequence[GlobalScalars], reduced: Reduced) -> GlobalScalars:
    """Reduced scalars as another number of optimizers would have reduced them.

    The total norm of a set is the root of the sum of the squares of all optimizers' norms.
    """
    longest = max(known, key=lambda one: (len(one.grad_norms), len(one.overflows)))
    before = len(longest.grad_norms) // reduced.sets
    if before * reduced.sets != len(longest.grad_norms):
        raise RefusedWindow(
            f'a step reduced {len(longest.grad_norms)} gradient norms of {reduced.sets} sets'
        )
    norms = []
    for start in range(0, len(longest.grad_norms), before or 1):
        norms += _as_many(longest.grad_norms[start : start + before], reduced.norms)
    overflows = [any(longest.overflows)] * reduced.overflows if longest.overflows else []
    return GlobalScalars(norms, overflows, longest.num_tokens)


def _as_many(norms: Sequence[float], count: int) -> list[float]:
    """`count` norms with the same total."""
    return list(norms) if len(norms) == count else [math.hypot(*norms)] + [0.0] * (count - 1)
