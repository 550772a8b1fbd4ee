# SPDX-License-Identifier: Apache-2.0
"""The auxiliary state between two iterations: RNG, scheduler, scalers, data position, counters.

The training thread captures it right before an iteration begins, so the state is exactly the start
of that iteration.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_current_running_global_batch_size,
    update_num_microbatches,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import convert_cuda_rng_state

from megatron.moevement.facts import Counters, MegatronOptimizer, OptimizerParamScheduler
from megatron.moevement.state.global_scalars import GlobalScalars
from megatron.moevement.state.optimizer_state import chained, counts_steps_per_group
from moevement_ext.capture.trainer_state import (
    GeneratorStates,
    capture_generators,
    restore_generators,
    state_bytes,
    state_tensor,
)

Setting = bool | int | float | str | None | list[float]
"""A value of a parameter group or a schedule; a tuple of numbers (betas) becomes a list."""

# Training itself changes these keys of a group; they are restored from other fields of the state.
_CHANGING = ('params', 'step', 'lr', 'num_steps')
WEIGHT_DECAY = 'weight_decay'


class RngState(GeneratorStates):
    """States of all random number generators of the process."""

    tracker: dict[str, bytes]


class ScalerState(msgspec.Struct):
    """One optimizer's dynamic loss scale; floats are exact fp32 values."""

    scale: float
    growth_tracker: int
    hysteresis_tracker: int


class IterationState(msgspec.Struct):
    """State at the start of iteration `iteration + 1`, except tensors."""

    iteration: int
    consumed_train_samples: int
    consumed_valid_samples: int
    skipped_train_samples: int
    floating_point_operations: float
    scheduler_steps: int
    scalars: GlobalScalars
    """Scalars that the step of `iteration` reduced; a replay of that iteration needs them."""
    rng: RngState
    scalers: list[ScalerState]
    group_steps: list[int | None]
    """Step counts of parameter groups (TE and Apex); None for optimizers that count steps per
    parameter, or none."""
    schedule: dict[str, Setting] = {}
    """Constants of the schedule. A dense checkpoint may differ from the flags, and a new
    process does not load that checkpoint."""
    groups: list[dict[str, Setting]] = []
    """Constants of each parameter group, stored for the same reason, and its weight decay: after a
    dense load, upstream computes the next iteration's decay before it reads the checkpoint's."""


_STATE = msgspec.msgpack.Decoder(IterationState)


def encode(state: IterationState) -> bytes:
    """Serialise for the context of a slot."""
    return msgspec.msgpack.encode(state)


def decode(encoded: bytes) -> IterationState:
    """Inverse of `encode`."""
    return _STATE.decode(encoded)


def capture(
    counters: Counters,
    iteration: int,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    scalars: GlobalScalars,
    floating_point_operations: float,
) -> IterationState:
    """State after `iteration` committed iterations. Training thread."""
    return IterationState(
        iteration=iteration,
        consumed_train_samples=counters.consumed_train_samples,
        consumed_valid_samples=counters.consumed_valid_samples,
        skipped_train_samples=counters.skipped_train_samples,
        floating_point_operations=floating_point_operations,
        scheduler_steps=scheduler.num_steps,
        scalars=scalars,
        rng=capture_rng(),
        scalers=scaler_states(optimizer),
        group_steps=list(_group_steps(optimizer)),
        schedule=_settings(scheduler.state_dict()),
        groups=[_settings(group) for group in optimizer.param_groups],
    )


def restore(
    state: IterationState,
    counters: Counters,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Put the process at the start of iteration `state.iteration + 1`. Training thread."""
    restore_counters(state, counters)
    _restore_settings(state, optimizer, scheduler)
    scheduler.num_steps = state.scheduler_steps
    scheduler.step(increment=0)  # recomputes learning rate and weight decay of every group
    for group, settings in zip(optimizer.param_groups, state.groups, strict=False):
        if WEIGHT_DECAY in settings:
            group[WEIGHT_DECAY] = settings[WEIGHT_DECAY]
    for scaler, saved in zip(_scalers(optimizer), state.scalers, strict=True):
        _restore_scaler(scaler, saved)
    _restore_group_steps(optimizer, state.group_steps)
    restore_rng(state.rng)


def forget_weight_decay(state: IterationState) -> None:
    """Let a restore of `state` compute the weight decay, for a changed scheduler position."""
    for settings in state.groups:
        settings.pop(WEIGHT_DECAY, None)


def restore_counters(state: IterationState, counters: Counters) -> None:
    """Restore iteration, data position and the values that depend on them."""
    counters.iteration = counters.curr_iteration = state.iteration
    counters.consumed_train_samples = state.consumed_train_samples
    counters.consumed_valid_samples = state.consumed_valid_samples
    counters.skipped_train_samples = state.skipped_train_samples
    counters.num_floating_point_operations_so_far = state.floating_point_operations
    update_num_microbatches(state.consumed_train_samples, consistency_check=False)
    get_rerun_state_machine().current_iteration = state.iteration


def move_to(iteration: int, consumed_train_samples: int, counters: Counters) -> None:
    """Advance the counters to `iteration` committed iterations and `consumed_train_samples`."""
    counters.skipped_train_samples += (iteration - counters.iteration) * skipped_samples()
    counters.iteration = counters.curr_iteration = iteration
    counters.consumed_train_samples = consumed_train_samples
    update_num_microbatches(consumed_train_samples, consistency_check=False)
    get_rerun_state_machine().current_iteration = iteration


def skipped_samples() -> int:
    """Samples that each iteration skips (`--decrease-batch-size-if-needed`)."""
    return int(get_current_global_batch_size() - get_current_running_global_batch_size())


def capture_rng() -> RngState:
    """States of all generators of this process."""
    tracker = {
        key: state_bytes(convert_cuda_rng_state(value))
        for key, value in get_cuda_rng_tracker().get_states().items()
    }
    return RngState(**msgspec.structs.asdict(capture_generators(on_device=True)), tracker=tracker)


def restore_rng(state: RngState) -> None:
    """Set all generators of this process."""
    restore_generators(state)
    tracker = get_cuda_rng_tracker()
    present = tracker.get_states()
    tracker.set_states(
        {key: _restored(present.get(key), state_tensor(v)) for key, v in state.tracker.items()}
    )


@contextmanager
def rng_kept() -> Iterator[None]:
    """Restore all generators at the end of the context."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)


def _restored(present: Any, state: torch.Tensor) -> object:
    """A state for the tracker; with `--te-rng-tracker` the present generator object, set to it."""
    if not isinstance(present, torch.Generator):
        return state
    present.set_state(state)
    return present


def scaler_states(optimizer: MegatronOptimizer) -> list[ScalerState]:
    """Loss scales of all inner optimizers."""
    return [_scaler_state(scaler) for scaler in _scalers(optimizer)]


def _scalers(optimizer: MegatronOptimizer) -> list[Any]:
    scalers = [getattr(inner, 'grad_scaler', None) for inner in chained(optimizer)]
    return [scaler for scaler in scalers if scaler is not None]


def _group_steps(optimizer: MegatronOptimizer) -> Iterator[int | None]:
    """Step counts of groups; ignores the `step` that a dense checkpoint leaves in torch's Adam."""
    for counted, group in _counted_groups(optimizer):
        yield int(group['step']) if counted and 'step' in group else None


def _restore_group_steps(optimizer: MegatronOptimizer, steps: list[int | None]) -> None:
    """Set step counts; groups of Muon, which counts no steps, get none from any layout."""
    for (counted, group), step in zip(_counted_groups(optimizer), steps, strict=True):
        if step is None or not counted:  # a group without a step yet counts from zero
            group.pop('step', None)
        else:
            group['step'] = step


def _counted_groups(optimizer: MegatronOptimizer) -> Iterator[tuple[bool, dict[str, Any]]]:
    """All parameter groups, and whether their optimizer counts the steps of a group."""
    for inner in chained(optimizer):
        for group in inner.optimizer.param_groups:
            yield counts_steps_per_group(inner.optimizer), group


def _settings(values: Mapping[str, Any]) -> dict[str, Setting]:
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if name not in _CHANGING and _is_setting(value)
    }


def _is_setting(value: object) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(number, float) for number in value)
    return value is None or isinstance(value, bool | int | float | str)


def _restore_settings(
    state: IterationState, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler
) -> None:
    vars(scheduler).update(state.schedule)
    for group, settings in zip(optimizer.param_groups, state.groups, strict=False):
        for name, value in settings.items():
            group[name] = tuple(value) if isinstance(value, list) else value


def _scaler_state(scaler: Any) -> ScalerState:
    dynamic = scaler.state_dict()
    if not dynamic:
        return ScalerState(scaler.scale.item(), growth_tracker=0, hysteresis_tracker=0)
    return ScalerState(**dynamic | {'scale': scaler.scale.item()})


def _restore_scaler(scaler: Any, state: ScalerState) -> None:
    scale = torch.full_like(scaler.scale, state.scale)
    scaler.load_state_dict(msgspec.structs.asdict(state) | {'scale': scale})
