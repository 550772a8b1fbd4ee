# SPDX-License-Identifier: Apache-2.0
"""Weights in fp8 are captured and restored as bytes and scales, light or in full."""

from typing import NamedTuple

import pytest
import torch

from megatron.moevement.seams import cpu_device

cpu_device.install()

from megatron.moevement.state import low_precision, training_state  # noqa: E402
from megatron.moevement.state.model_operators import Operator  # noqa: E402
from megatron.moevement.state.optimizer_state import (  # noqa: E402
    ParameterState,
    complete_restore,
)
from moevement_ext.capture.layout import OperatorSlices, SlotLayout, TensorSlice  # noqa: E402
from moevement_ext.memory.window.slot import Record  # noqa: E402
from moevement_ext.plan.byte_planner import WindowPlan  # noqa: E402
from tests.stand_ins import fp8_weights  # noqa: E402

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
    count = END - START
    weights = {'weight': count, 'weight_scale': 4 * SCALES[recipe]}
    assert sizes(rank(recipe, 1).slices.weights) == weights
    assert sizes(rank(recipe, 1).slices.full) == weights | dict.fromkeys(
        ('master', 'exp_avg', 'exp_avg_sq'), 4 * count
    )


@pytest.mark.parametrize('recipe', SCALES)
def test_rank_without_a_shard_has_the_scales(recipe: str) -> None:
    scales = {'weight_scale': 4 * SCALES[recipe]}
    without = rank(recipe, 1, shard=False).slices
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
