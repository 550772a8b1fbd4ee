# SPDX-License-Identifier: Apache-2.0
"""One parameter with an optimizer that keeps its master: captured and restored by the product."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron.moevement.state import optimizer_state, training_state
from megatron.moevement.state.model_operators import Operator
from megatron.moevement.state.optimizer_state import ParameterState
from moevement_ext.capture.layout import SlotLayout
from moevement_ext.plan.byte_planner import WindowPlan
from tests.stand_ins import rules
from tests.stand_ins.rules import Formats, WeightKind

Bits = dict[str, torch.Tensor]


class OneRank:
    """A parameter on one rank, as upstream's distributed optimizer has it.

    Args:
        kind: class of the inner optimizer, which keeps masters and is given views of weights.
        formats: what they are kept in.
        device: of all tensors.
        steps: how many to make.
        in_fp8: makes the weight, if that is in fp8.
    """

    def __init__(
        self,
        kind: Callable[..., Any],
        formats: Formats,
        device: str = 'cpu',
        steps: int = 0,
        in_fp8: WeightKind | None = None,
    ) -> None:
        (self.main,), self.adam = rules.precise_adam(kind, formats, device, in_fp8=in_fp8)
        config = SimpleNamespace(use_precision_aware_optimizer=True)
        optimizer_state._allocate(SimpleNamespace(optimizer=self.adam, config=config))
        self.device, self.steps = device, 0
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.main.decoupled_grad = rules.gradient_of(self.steps, self.device)
        self.adam.step()
        self.steps += 1

    @property
    def state(self) -> ParameterState:
        share = range(self.main.numel())
        return ParameterState('w', self.main, self.main, self.adam, 0, share, None)

    @property
    def operators(self) -> dict[str, Operator]:
        return {'rest': Operator('rest', 'rest', {'w': self.main}, {})}

    def captured(self) -> Bits:
        """Copies of all that a full slot holds, by part."""
        (found,) = training_state.operator_slices(self.operators, {self.main: self.state}).values()
        return {item.part: item.source.clone() for item in found.full}

    def restore(self, bits: Bits) -> None:
        """By the product, from records as a slot has them."""
        states = {self.main: self.state}
        captured = training_state.operator_slices(self.operators, states)
        records = SlotLayout(WindowPlan((('rest',),)), 0, captured).records
        assert {record.part for record in records} == bits.keys()
        with torch.no_grad():
            training_state.restore_slices(records, lambda record: bits[record.part], captured)


def assert_same(one: Bits, other: Bits) -> None:
    assert one.keys() == other.keys()
    for part, bits in one.items():
        assert torch.equal(bits.view(torch.uint8), other[part].view(torch.uint8)), part


def check_restored(
    kind: Callable[..., Any],
    formats: Formats,
    device: str = 'cpu',
    in_fp8: WeightKind | None = None,
) -> None:
    """A fresh optimizer that is given what another one had goes on with the same bits."""
    trained = OneRank(kind, formats, device, 3, in_fp8)
    fresh = OneRank(kind, formats, device, 1, in_fp8)
    captured = trained.captured()
    fresh.restore(captured)
    assert_same(fresh.captured(), captured)
    fresh.adam.param_groups[0]['step'] = fresh.steps = 3
    for one in (trained, fresh):
        one.step()
    assert_same(fresh.captured(), trained.captured())
