# SPDX-License-Identifier: Apache-2.0
"""State is created through the interface of Transformer Engine's optimizer."""

from types import SimpleNamespace

import pytest
import torch

from megatron.moevement.state import iteration_state, optimizer_state
from tests.stand_ins.fused_adam import FusedAdam, OlderFusedAdam


def _upstream_optimizer(inner: torch.optim.Optimizer) -> SimpleNamespace:
    config = SimpleNamespace(use_precision_aware_optimizer=True)
    return SimpleNamespace(optimizer=inner, config=config, param_groups=inner.param_groups)


def test_remainders_are_created_for_bf16_parameters_only() -> None:
    parameters = [
        torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)
    ]
    inner = FusedAdam(parameters, master_weights=True, store_param_remainders=True)
    optimizer_state._allocate(_upstream_optimizer(inner))
    dtypes = [inner.state[parameter]['master_param'].dtype for parameter in parameters]
    assert dtypes == [torch.int16, torch.float32]
    assert all('step' not in state for state in inner.state.values())


def test_group_step_is_captured_if_the_optimizer_counts_it() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    fused, torchs = FusedAdam([parameter]), torch.optim.AdamW([parameter])
    steps = []
    for inner in (fused, torchs):
        inner.param_groups[0]['step'] = 8.0  # as a dense checkpoint leaves it
        steps += iteration_state._group_steps(_upstream_optimizer(inner))
    assert steps == [8, None]


@pytest.mark.parametrize('kind', [FusedAdam, OlderFusedAdam])
@pytest.mark.parametrize('taken', [0, 2], ids=['before the first step', 'after two'])
def test_steps_continue_from_the_captured_count(kind: type[FusedAdam], taken: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    inner = kind([{'params': [parameter]}, {'params': []}])
    optimizer = _upstream_optimizer(inner)

    def counted_after(steps: int) -> list[int | None]:
        for _ in range(steps):
            inner.step()
        return list(iteration_state._group_steps(optimizer))

    captured = counted_after(taken)
    expected = counted_after(1)
    counted_after(3)
    iteration_state._restore_group_steps(optimizer, captured)
    assert list(iteration_state._group_steps(optimizer)) == captured
    assert counted_after(1) == expected


def test_muon_gets_no_step_of_another_layout() -> None:
    class TensorParallelMuon(torch.optim.SGD):
        """Counts no steps, as upstream's."""

    optimizer = _upstream_optimizer(TensorParallelMuon([torch.nn.Parameter(torch.zeros(2))]))
    iteration_state._restore_group_steps(optimizer, [5])
    assert 'step' not in optimizer.param_groups[0]
