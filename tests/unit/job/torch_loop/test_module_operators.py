# SPDX-License-Identifier: Apache-2.0
"""Operators of a module: capture, load and freeze."""

import msgspec
import numpy as np
import pytest
import torch
from torch import nn, optim

from moevement_ext.capture.layout import SlotLayout
from moevement_ext.config import ConfigurationError
from moevement_ext.job.torch_loop.module_operators import ModuleOperators
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.slot import FORMAT_VERSION, SlotContext, SlotHeader
from moevement_ext.plan.byte_planner import WindowPlan


class Net(nn.Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList([nn.Linear(width, 2) for _ in range(2)])
        self.norm = nn.BatchNorm1d(2)


def by_module(name: str) -> tuple[str, str]:
    return name.rpartition('.')[0], 'rest'


def operators_of(module: nn.Module) -> ModuleOperators:
    return ModuleOperators(module, optim.Adam(module.parameters()), by_module)


def captured(operators: ModuleOperators, slot: int) -> tuple[SlotHeader, np.ndarray, SlotContext]:
    """A slot of a window: the first slot has the router, the second the other operators."""
    others = tuple(name for name in operators.slices if name != 'router')
    layout = SlotLayout(WindowPlan((('router',), others)), slot, operators.slices)
    payload = np.zeros(layout.payload_bytes, np.uint8)
    for volatile in (True, False):
        for piece in layout.copies(payload, volatile):
            for target, source in zip(piece.targets, piece.sources, strict=True):
                target.copy_(source)
    context = SlotContext(list(layout.full), list(layout.weights), b'')
    header = SlotHeader(
        version=FORMAT_VERSION, run='', topology='', owner=0, start=0, window=2, slot=slot,
        iteration=slot, plan='', payload_bytes=layout.payload_bytes, records=layout.records,
        context=msgspec.msgpack.encode(context),
    )  # fmt: skip
    return header, payload, context


def changed(operators: ModuleOperators) -> dict[str, set[str]]:
    """Parts that are no longer -1, by operator."""
    return {
        name: {item.part for item in held.full if not (item.source == -1).all()}
        for name, held in operators.slices.items()
    }


def test_load_changes_only_the_contents_of_the_slot() -> None:
    operators = operators_of(Net())
    slot = captured(operators, 0)
    for held in operators.slices.values():
        for item in held.full:
            item.source.fill_(-1)
    operators.load(*slot)
    assert changed(operators) == {
        'router': {'weight', 'exp_avg', 'exp_avg_sq', 'step'},
        'experts.0': {'weight'},
        'experts.1': {'weight'},
        'norm': {'weight', 'buffer'},
    }


def test_both_slots_restore_the_state_bit_for_bit() -> None:
    operators = operators_of(Net())
    slots = captured(operators, 0), captured(operators, 1)
    items = [item for held in operators.slices.values() for item in held.full]
    expected = [item.source.clone() for item in items]
    for item in items:
        item.source.fill_(-1)
    for slot in slots:
        operators.load(*slot)
    for item, value in zip(items, expected, strict=True):
        assert torch.equal(item.source, value)


def test_slot_of_another_model_is_refused() -> None:
    with pytest.raises(RefusedWindow, match=r'no experts\.0\.weight .*elements 0 to 6'):
        operators_of(Net(width=3)).load(*captured(operators_of(Net()), 0))


def test_freeze_disables_gradients_of_frozen_operators_only() -> None:
    module = Net()
    operators = operators_of(module)
    operators.freeze(['experts.1'])
    frozen = {name for name, item in module.named_parameters() if not item.requires_grad}
    assert frozen == {'experts.1.weight', 'experts.1.bias'}
    operators.freeze([])
    assert all(parameter.requires_grad for parameter in module.parameters())


def without_a_parameter() -> None:
    module = Net()
    ModuleOperators(module, optim.Adam(module.router.parameters()), by_module)


def with_a_fixed_parameter() -> None:
    module = Net()
    module.router.bias.requires_grad_(False)
    operators_of(module)


def with_a_parameter_of_another_module() -> None:
    module, other = Net(), nn.Linear(3, 3, bias=False)
    ModuleOperators(module, optim.Adam([*module.parameters(), *other.parameters()]), by_module)


def with_an_integer_in_the_state() -> None:
    module = Net()
    adam = optim.Adam(module.parameters())
    adam.state[module.router.bias] = {'step': 0}
    ModuleOperators(module, adam, by_module)


def with_state_of_the_whole_optimizer() -> None:
    module = Net()
    adam = optim.Adam(module.parameters())
    adam.state['round'] = {'step': torch.zeros(1)}
    ModuleOperators(module, adam, by_module)


def with_a_buffer_of_a_rare_type() -> None:
    module = Net()
    module.register_buffer('scale', torch.zeros(2, dtype=torch.float8_e4m3fnuz))
    operators_of(module)


def test_buffers_of_all_usual_types_are_restored() -> None:
    module = Net()
    for dtype in (torch.complex128, torch.uint16, torch.uint32, torch.uint64):
        module.register_buffer(str(dtype)[6:], torch.tensor([3, 5], dtype=dtype))
    operators = operators_of(module)
    slots = captured(operators, 0), captured(operators, 1)
    for buffer in operators.buffers:
        buffer.zero_()
    for slot in slots:
        operators.load(*slot)
    assert module.complex128.tolist() == module.uint32.tolist() == [3, 5]
    assert module.uint16.tolist() == module.uint64.tolist() == [3, 5]


@pytest.mark.parametrize(
    ('build', 'message'),
    [
        (with_a_parameter_of_another_module, r'a tensor of shape \[3, 3\], which is no parameter'),
        (with_an_integer_in_the_state, r'step of router\.bias as int, which windows cannot hold'),
        (with_state_of_the_whole_optimizer, "has 'round', which is no parameter of the model"),
        (with_a_buffer_of_a_rare_type, r'scale \(buffer\) is of torch\.float8_e4m3fnuz'),
        (without_a_parameter, r'does not have experts\.0\.weight'),
        (with_a_fixed_parameter, r'router\.bias has requires_grad=False'),
    ],
)
def test_model_that_cannot_be_frozen_by_operator_is_refused(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(ConfigurationError, match=message):
        build()
