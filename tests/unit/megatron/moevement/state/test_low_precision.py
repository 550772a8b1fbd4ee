# SPDX-License-Identifier: Apache-2.0
"""State of 16 and 8 bits is captured as stored; interface of the optimizer that has it."""

from types import SimpleNamespace

import pytest
import torch

from megatron.moevement.seams.adam import keeping
from megatron.moevement.state import iteration_state, optimizer_state, training_state
from megatron.moevement.state.optimizer_state import ParameterState
from tests.stand_ins import rules
from tests.stand_ins.fp8_weights import delayed_weight
from tests.stand_ins.fused_adam import FusedAdam, OlderFusedAdam
from tests.stand_ins.one_rank import OneRank, assert_same, check_restored
from tests.stand_ins.rules import BF16, FORMATS, FORMATS_OF_FP8_WEIGHTS, FP8, FP16, FP32, Formats

KEEPING = keeping(FusedAdam)
MASTERS = {
    f'{name} weights, fp8 masters': Formats(weight, FP8, FP8, FP16)
    for name, weight in (('bf16', BF16), ('fp8', FP8))
}


@pytest.mark.parametrize('name', [*FORMATS, *FORMATS_OF_FP8_WEIGHTS, *MASTERS])
def test_every_format_is_restored(name: str) -> None:
    formats = {**FORMATS, **FORMATS_OF_FP8_WEIGHTS, **MASTERS}[name]
    in_fp8 = delayed_weight if formats.weight == FP8 else None
    check_restored(KEEPING if name in MASTERS else FusedAdam, formats, in_fp8=in_fp8)


@pytest.mark.parametrize(
    ('name', 'weight_and_master', 'scales'),
    [
        ('remainders', 2 + 2, 0),
        ('fp16', 2 + 2, 3),
        ('fp16-master', 2 + 2, 1),
        ('fp8-and-fp16-moments', 2 + 2, 3),
        ('fp8-moments', 2 + 2, 2),
        ('bf16-moments', 2 + 2, 0),
        ('c3', 1 + 2, None),
        ('c4', 1 + 2, None),
    ],
)
def test_weight_is_captured_beside_its_master(
    name: str, weight_and_master: int, scales: int | None
) -> None:
    formats = {**FORMATS, **FORMATS_OF_FP8_WEIGHTS}[name]
    in_fp8 = delayed_weight if formats.weight == FP8 else None
    captured = OneRank(FusedAdam, formats, in_fp8=in_fp8).captured()
    assert captured['weight'].dtype == formats.weight
    if scales is None:
        assert {'weight_scale', 'scale/master_param'} <= captured.keys()
        assert captured['master_param'].dtype == FP16
        scales = sum('scale' in part for part in captured)
    moments = formats.first.itemsize + formats.second.itemsize
    expected = 64 * (weight_and_master + moments) + 4 * scales
    assert sum(bits.nbytes for bits in captured.values()) == expected


def test_masters_that_megatron_holds_are_captured_without_the_weight() -> None:
    weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    main = torch.ones(64)
    adam = FusedAdam([main], exp_avg_dtype=FP8)
    adam.initialize_state(main, False)
    state = ParameterState('w', weight, main, adam, 0, range(64), None)
    parts = {item.part: item.source.dtype for item in training_state._full('rest', state)}
    assert parts == {'master': FP32, 'exp_avg': FP8, 'exp_avg_sq': FP32, 'scale_inv/exp_avg': FP32}


def test_parameter_without_gradients_is_unchanged() -> None:
    one = OneRank(FusedAdam, FORMATS['fp8-and-fp16-moments'], steps=2)
    before = one.captured()
    one.main.decoupled_grad = rules.gradient_of(2, 'cpu')
    one.state.drop_gradient()
    one.adam.step()
    assert_same(one.captured(), before)


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
