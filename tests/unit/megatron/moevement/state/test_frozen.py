# SPDX-License-Identifier: Apache-2.0
"""Which parameters ask for a gradient while operators are frozen."""

import pytest
import torch

from megatron.moevement.state.frozen import FrozenOperators, _no_delayed_gradient_of_frozen
from megatron.moevement.state.operators import Operator
from megatron.moevement.state.optimizer_state import ParameterState
from tests.stand_ins import rules
from tests.stand_ins.grouped_linear import GroupedLinear

EXPERTS = 'chunk0.decoder.layers.0.mlp.experts'


def experts(*names: str) -> dict[str, Operator]:
    """Two experts, each with one parameter of the given names."""
    return {
        f'layer1.expert{number}': Operator(
            f'layer1.expert{number}', 'expert', {name: torch.nn.Parameter(torch.ones(2))}
        )
        for number, name in enumerate(names)
    }


def active(operators: dict[str, Operator], *frozen: str) -> list[bool]:
    """Which experts ask for a gradient."""
    FrozenOperators(operators, {}, [], None).freeze(frozen)
    return [
        parameter.requires_grad
        for operator in operators.values()
        for parameter in operator.parameters.values()
    ]


def test_experts_of_a_grouped_layer_thaw_together() -> None:
    """The layer looks at its first weight alone, and computes all gradients or none."""
    grouped = experts(f'{EXPERTS}.linear_fc1.weight0', f'{EXPERTS}.linear_fc1.weight1')
    assert active(grouped, 'layer1.expert0') == [True, True]
    assert active(grouped, 'layer1.expert1') == [True, True]
    assert active(grouped, *grouped) == [False, False]
    assert active(grouped) == [True, True]


def test_an_active_expert_of_a_grouped_layer_has_its_gradient() -> None:
    layer = GroupedLinear(3, 16, 32, init_method=torch.nn.init.zeros_, params_dtype=torch.float32)
    whole = rules.gradients_of_grouped(layer, [True] * 3)
    layer.zero_grad()
    grouped = {
        f'layer1.expert{number}': Operator(
            f'layer1.expert{number}', 'expert', {f'{EXPERTS}.linear_fc1.{name}': weight}
        )
        for number, (name, weight) in enumerate(layer.named_parameters())
    }
    wanted = active(grouped, 'layer1.expert0', 'layer1.expert1')
    _, _, _, of_active = rules.gradients_of_grouped(layer, wanted)
    assert of_active is not None
    assert torch.equal(of_active, whole[3])


def test_experts_with_layers_of_their_own_are_frozen_one_by_one() -> None:
    single = experts(
        f'{EXPERTS}.local_experts.0.linear_fc1.weight',
        f'{EXPERTS}.local_experts.1.linear_fc1.weight',
    )
    assert active(single, 'layer1.expert0') == [False, True]
    assert active(single) == [True, True]


def test_a_frozen_layer_is_not_asked_for_delayed_gradients() -> None:
    layer = GroupedLinear(
        3,
        16,
        32,
        init_method=torch.nn.init.zeros_,
        params_dtype=torch.float32,
        delay_wgrad_compute=True,
    )
    model = [torch.nn.Sequential(torch.nn.Linear(2, 2), layer)]
    with _no_delayed_gradient_of_frozen(model):
        rules.gradients_of_grouped(layer, [False] * 3)
        layer.backward_dw()
        rules.gradients_of_grouped(layer, [True] * 3)
        layer.backward_dw()
        with pytest.raises(RuntimeError, match='empty'):
            layer.backward_dw()
    assert layer.weight2.grad is not None and layer.weight2.grad.any()
    rules.gradients_of_grouped(layer, [False] * 3)
    with pytest.raises(RuntimeError, match='empty'):
        layer.backward_dw()


def test_what_is_frozen_has_no_gradient_when_the_update_comes() -> None:
    """Neither the usual one nor that which upstream gives beside a weight of 16 bits."""
    weights = {name: torch.nn.Parameter(torch.ones(2)) for name in ('rest', 'expert')}
    states = {
        weight: ParameterState(name, weight, weight, None, 0, range(2), None)
        for name, weight in weights.items()
    }
    operators = {name: Operator(name, 'rest', {name: weight}) for name, weight in weights.items()}

    class Upstream:
        def prepare_grads(self) -> bool:
            for weight in weights.values():
                weight.grad, weight.decoupled_grad = torch.ones(2), torch.ones(2)
            return False

    upstream = Upstream()
    frozen = FrozenOperators(operators, states, [], None)
    frozen.freeze(['expert'])
    with frozen._without_frozen_gradients(upstream):
        upstream.prepare_grads()
    found = {name: (one.grad, one.decoupled_grad) for name, one in weights.items()}
    assert found['expert'] == (None, None)
    assert all(gradient is not None for gradient in found['rest'])
