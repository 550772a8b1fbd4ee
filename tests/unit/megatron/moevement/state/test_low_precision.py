# SPDX-License-Identifier: Apache-2.0
"""State of 16 and 8 bits is captured and restored as stored, with its scales."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from megatron.core import fp8_utils

from megatron.moevement.seams.adam import keeping
from megatron.moevement.state import low_precision, optimizer_state, training_state
from megatron.moevement.state.model_operators import Operator
from megatron.moevement.state.optimizer_state import (
    ParameterState,
    complete_restore,
)
from moevement_ext.capture.layout import OperatorSlices, SlotLayout, TensorSlice
from moevement_ext.memory.window.slot import Record
from moevement_ext.plan.byte_planner import WindowPlan
from tests.stand_ins import fp8_compute, fp8_weights, rules
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
    SCALE,
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


def test_fp8_weight_is_not_a_function_of_its_master() -> None:
    one = OneRank(FusedAdam, FORMATS_OF_FP8_WEIGHTS['c3'], in_fp8=delayed_weight)
    others = 0
    for _ in range(40):
        one.step()
        master = one.adam.get_unscaled_state(one.main, 'master_param')
        derived = delayed_weight(master, *torch.tensor([[SCALE], [0.0]]))
        others += int((low_precision.raw(derived) != low_precision.raw(one.main)).sum())
    assert others


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


def test_round_trip_through_fp32_changes_state() -> None:
    """Hence windows hold bits and scales, not the result of `get_unscaled_state`."""
    random = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.zeros(64))
    adam = FusedAdam([weight], exp_avg_dtype=FP8)
    changed = 0
    for _ in range(500):
        adam.set_scaled_state(weight, 'exp_avg', torch.randn(64, generator=random))
        held = adam.state[weight]['exp_avg']
        before = held._data.clone(), held._scale_inv.clone()
        adam.set_scaled_state(weight, 'exp_avg', adam.get_unscaled_state(weight, 'exp_avg'))
        changed += not all(map(torch.equal, before, (held._data, held._scale_inv)))
    assert changed


def test_state_is_created_once() -> None:
    one = OneRank(FusedAdam, FORMATS['fp8-and-fp16-moments'], steps=1)
    before = one.captured()
    config = SimpleNamespace(use_precision_aware_optimizer=True)
    optimizer_state._allocate(SimpleNamespace(optimizer=one.adam, config=config))
    assert_same(one.captured(), before)


def test_parameter_without_gradients_is_unchanged() -> None:
    one = OneRank(FusedAdam, FORMATS['fp8-and-fp16-moments'], steps=2)
    before = one.captured()
    one.main.decoupled_grad = rules.gradient_of(2, 'cpu')
    one.state.drop_gradient()
    one.adam.step()
    assert_same(one.captured(), before)


def test_torch_optimizer_has_no_scales() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    adam = torch.optim.AdamW([weight])
    weight.grad = torch.ones(4)
    adam.step()
    assert ParameterState('w', weight, weight, adam, 0, range(4), None).scales() == {}


START, END = 64, 512
SCALES = {'tensorwise': 1, 'blockwise': 4}
"""Number of scales of a [32, 32] matrix, by recipe."""


class Rank(NamedTuple):
    """One weight on a rank that holds a shard of it, or none."""

    weight: torch.nn.Parameter
    states: dict[torch.nn.Parameter, ParameterState]
    operators: dict[str, Operator]

    @property
    def slices(self) -> OperatorSlices:
        return training_state.operator_slices(self.operators, self.states)['rest']

    def restore(self, records: list[Record], contents: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            training_state.restore_slices(
                records, lambda record: contents[record.part], {'rest': self.slices}
            )


def rank(recipe: str, seed: int, shard: bool = True) -> Rank:
    values = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)) * seed
    weight = fp8_weights.in_fp8(torch.nn.Parameter(values.bfloat16()), recipe)
    states = {}
    if shard:
        main = weight.float().detach().flatten()[START:END].clone()
        adam = torch.optim.AdamW([main])
        adam.state[main] = {name: main.clone() for name in ('exp_avg', 'exp_avg_sq')}
        states[weight] = ParameterState('w', weight, main, adam, START, range(START, END), None)
    return Rank(weight, states, {'rest': Operator('rest', 'rest', {'w': weight})})


def sizes(parts: tuple[TensorSlice, ...]) -> dict[str, int]:
    return {item.part: item.nbytes for item in parts}


@pytest.mark.parametrize('recipe', SCALES)
def test_fp8_weight_takes_one_byte_per_element(recipe: str) -> None:
    """A rank without a shard has the scales."""
    count, scales = END - START, {'weight_scale': 4 * SCALES[recipe]}
    one, without = rank(recipe, 1).slices, rank(recipe, 1, shard=False).slices
    weights = {'weight': count, **scales}
    state = dict.fromkeys(('master', 'exp_avg', 'exp_avg_sq'), 4 * count)
    assert (sizes(one.weights), sizes(one.full)) == (weights, weights | state)
    assert (sizes(without.full), sizes(without.weights)) == (scales, scales)


@pytest.mark.parametrize('recipe', SCALES)
@pytest.mark.parametrize('slot', [0, 1], ids=['weights', 'full'])
def test_bytes_and_scales_are_restored_independently_of_masters(recipe: str, slot: int) -> None:
    trained, fresh = rank(recipe, 3), rank(recipe, 1)
    layout = SlotLayout(WindowPlan(((), ('rest',))), slot, {'rest': trained.slices})
    parts = trained.slices.full if slot else trained.slices.weights
    contents = {item.part: item.source.clone().view(-1) for item in parts}
    place = low_precision.raw(fresh.weight).data_ptr()
    fresh.restore(layout.records, contents)
    (state,) = fresh.states.values()
    complete_restore([state], [], frozenset() if slot else frozenset({'w'}), distributed=True)
    found = {
        item.part: item.source for item in (fresh.slices.full if slot else fresh.slices.weights)
    }
    for part, content in contents.items():
        assert torch.equal(found[part].view(-1), content), part
    assert low_precision.raw(fresh.weight).data_ptr() == place
    assert torch.equal(
        fresh.weight.dequantize().flatten()[START:END],
        trained.weight.dequantize().flatten()[START:END],
    )


RECIPE = fp8_compute.Recipe(True, fp8_compute.E5M2, amax_history_len=4)


def model(fp8: str | None, recipe: str) -> torch.nn.Module:
    chunk = torch.nn.Sequential(fp8_compute.Linear(), torch.nn.Linear(2, 2))
    chunk.config = SimpleNamespace(fp8=fp8, fp8_recipe=recipe)
    return chunk


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> None:
    made = lambda config: fp8_compute.autocast(RECIPE, None)  # noqa: E731
    monkeypatch.setattr(fp8_utils, 'get_fp8_context', made)


@pytest.mark.usefixtures('context')
def test_scaling_is_created_for_all_modules_that_have_it() -> None:
    chunk = model('hybrid', 'delayed')
    assert dict(low_precision.scaling_of(chunk)) == {}
    low_precision.create_scaling([chunk])
    found = {name: tuple(state.shape) for name, state in low_precision.scaling_of(chunk)}
    assert found == {
        '0.scaling_fwd.scale': (3,),
        '0.scaling_fwd.amax_history': (4, 3),
        '0.scaling_bwd.scale': (2,),
        '0.scaling_bwd.amax_history': (4, 2),
    }


@pytest.mark.usefixtures('context')
@pytest.mark.parametrize(('fp8', 'recipe'), [(None, 'delayed'), ('hybrid', 'tensorwise')])
def test_scaling_is_created_for_delayed_recipes_only(fp8: str | None, recipe: str) -> None:
    chunk = model(fp8, recipe)
    low_precision.create_scaling([chunk])
    assert dict(low_precision.scaling_of(chunk)) == {}
