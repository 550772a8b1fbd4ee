# SPDX-License-Identifier: Apache-2.0
"""Overflow flags and loss scales belong to one of several optimizers each."""

import pytest

from megatron.moevement.seams import cpu_device

cpu_device.install()

from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler  # noqa: E402

from megatron.moevement.state import iteration_state  # noqa: E402
from megatron.moevement.state.global_scalars import ScalarRecorder  # noqa: E402


def scaler(hysteresis: int = 2, lowest: float = 256.0) -> DynamicGradScaler:
    return DynamicGradScaler(1024.0, lowest, 2.0, 0.5, 3, hysteresis)


def test_each_optimizer_skips_by_its_own_flag_again() -> None:
    """Upstream steps if neither overflowed, but moves each scale by its own flag."""
    recorder = ScalarRecorder()
    computed = {'dense': True, 'experts': False}
    flags = [recorder._overflow(computed.__getitem__, name) for name in computed]
    recorded = recorder.take()
    assert recorded.overflows == flags == [True, False]
    with recorder.replaying(recorded):
        replayed = [recorder._overflow(lambda name: False, name) for name in computed]
    assert replayed == flags
    assert recorder.take().overflows == flags, 'for the ledger of the stage that replays'


@pytest.mark.parametrize('overflows', [[True], [False, False], [True, False], [True] * 5])
def test_scales_of_two_optimizers_that_drifted_apart_come_back(overflows: list[bool]) -> None:
    trained, fresh = [scaler(), scaler()], [scaler(), scaler()]
    for overflow in overflows:
        trained[0].update(overflow)
        trained[1].update(False)
    saved = [iteration_state._scaler_state(one) for one in trained]
    for one, state in zip(fresh, saved, strict=True):
        iteration_state._restore_scaler(one, state)
    for flags in ((True, False), (False, True), (False, False), (False, False), (True, True)):
        for one, other, overflow in zip(trained, fresh, flags, strict=True):
            one.update(overflow)
            other.update(overflow)
        assert [iteration_state._scaler_state(one) for one in fresh] == [
            iteration_state._scaler_state(one) for one in trained
        ]
    assert all(one.scale.item() >= 256.0 for one in fresh)


def test_a_fixed_scale_has_no_trackers() -> None:
    fixed = ConstantGradScaler(1024.0)
    state = iteration_state._scaler_state(fixed)
    assert (state.scale, state.growth_tracker, state.hysteresis_tracker) == (1024.0, 0, 0)
    iteration_state._restore_scaler(fixed, state)
    assert fixed.scale.item() == 1024.0
