# SPDX-License-Identifier: Apache-2.0
"""State of 16 and 8 bits is captured and restored as stored, with its scales."""

import pytest
import torch

from megatron.moevement.seams.adam import keeping
from megatron.moevement.state import training_state
from megatron.moevement.state.optimizer_state import (
    ParameterState,
)
from tests.stand_ins import rules
from tests.stand_ins.fp8_weights import delayed_weight
from tests.stand_ins.fused_adam import FusedAdam
from tests.stand_ins.one_rank import OneRank, assert_same, check_restored
from tests.stand_ins.rules import (
    BF16,
    FORMATS,
    FORMATS_OF_FP8_WEIGHTS,
    FP8,
    FP16,
    FP32,
    Formats,
)


@pytest.mark.parametrize('name', FORMATS)
def test_every_format_is_restored(name: str) -> None:
    check_restored(FusedAdam, FORMATS[name])


@pytest.mark.parametrize('name', FORMATS_OF_FP8_WEIGHTS)
def test_fp8_weights_are_restored_beside_masters_of_adam(name: str) -> None:
    check_restored(FusedAdam, FORMATS_OF_FP8_WEIGHTS[name], in_fp8=delayed_weight)


@pytest.mark.parametrize('weight', [BF16, FP8])
def test_fp8_masters_are_restored(weight: torch.dtype) -> None:
    in_fp8 = delayed_weight if weight == FP8 else None
    check_restored(keeping(FusedAdam), Formats(weight, FP8, FP8, FP16), in_fp8=in_fp8)


@pytest.mark.parametrize(('name', 'a_parameter'), [('c3', 1 + 2 + 4 + 4), ('c4', 1 + 2 + 1 + 2)])
def test_fp8_weights_and_masters_have_the_documented_size(name: str, a_parameter: int) -> None:
    formats = FORMATS_OF_FP8_WEIGHTS[name]
    captured = OneRank(FusedAdam, formats, in_fp8=delayed_weight).captured()
    assert captured['weight'].dtype == FP8 and captured['master_param'].dtype == FP16
    scales = sum('scale' in part for part in captured)
    assert sum(bits.nbytes for bits in captured.values()) == 64 * a_parameter + 4 * scales
    assert 'weight_scale' in captured and 'scale/master_param' in captured


@pytest.mark.parametrize(
    ('name', 'weight_and_master', 'scales'),
    [
        ('remainders', 2 + 2, 0),
        ('fp16', 2 + 2, 3),
        ('fp16-master', 2 + 2, 1),
        ('fp8-and-fp16-moments', 2 + 2, 3),
        ('fp8-moments', 2 + 2, 2),
        ('bf16-moments', 2 + 2, 0),
    ],
)
def test_weight_is_captured_beside_its_master(
    name: str, weight_and_master: int, scales: int
) -> None:
    formats = FORMATS[name]
    captured = OneRank(FusedAdam, formats).captured()
    assert captured['weight'].dtype == formats.weight
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
