# SPDX-License-Identifier: Apache-2.0
"""The stand-ins have the rules of Transformer Engine that the adapter relies on."""

import inspect

import pytest
import torch

from tests.stand_ins import rules
from tests.stand_ins.fused_adam import FusedAdam, OlderFusedAdam
from tests.stand_ins.grouped_linear import GroupedLinear


@pytest.mark.parametrize(
    ('kind', 'of_empty_group'), [(FusedAdam, 3), (OlderFusedAdam, None)], ids=['newer', 'older']
)
def test_adam_counts_by_group_and_leaves_alone_what_has_no_gradient(
    kind: type[FusedAdam], of_empty_group: int | None
) -> None:
    facts = rules.facts_of_adam(kind, 'cpu')
    assert facts.state == dict.fromkeys(('exp_avg', 'exp_avg_sq'), (torch.float32, (4,)))
    assert facts.steps == [3, of_empty_group]
    assert facts.without_gradient == [1.0] * 4 + [0.0] * 8
    assert facts.in_place
    assert facts.replaced_by_load


@pytest.mark.parametrize('adam_w_mode', [True, False])
def test_adam_computes_what_adam_computes(adam_w_mode: bool) -> None:
    torchs = torch.optim.AdamW if adam_w_mode else torch.optim.Adam

    def make(groups: list, *, adam_w_mode: bool, **settings: object) -> torch.optim.Optimizer:
        return torchs(groups, **settings)

    expected = rules.facts_of_adam(make, 'cpu', adam_w_mode).values
    found = rules.facts_of_adam(FusedAdam, 'cpu', adam_w_mode).values
    assert {*expected} - {*found} == {'step'}
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])


def test_state_of_adam_is_not_made_without_saying_in_which_form() -> None:
    empty = inspect.Parameter.empty
    assert rules.arguments(FusedAdam.initialize_state)['store_param_remainders'] is empty
    assert rules.masters_of_adam(FusedAdam, 'cpu') == {
        torch.bfloat16: torch.int16, torch.float32: torch.float32,
    }  # fmt: skip


def test_delayed_gradients_have_the_same_bits() -> None:
    make = {'init_method': torch.nn.init.zeros_, 'params_dtype': torch.float32}
    at_once = rules.gradients_of_grouped(GroupedLinear(3, 16, 32, **make), [True] * 3)
    later = GroupedLinear(3, 16, 32, delay_wgrad_compute=True, **make)
    found = rules.delayed_gradients_of_grouped(later, [True] * 3)
    assert (found['computed'], found['hooks']) == (True, ([], ['hook']))
    assert found['marked'] == [True] * 3
    for gradient, expected in zip(found['gradients'], at_once[1:], strict=True):
        assert torch.equal(gradient, expected)


def test_nothing_is_put_aside_for_frozen_weights() -> None:
    make = {'init_method': torch.nn.init.zeros_, 'params_dtype': torch.float32}
    layer = GroupedLinear(3, 16, 32, delay_wgrad_compute=True, **make)
    found = rules.delayed_gradients_of_grouped(layer, [False] * 3)
    assert (found['computed'], found['hooks']) == (False, ([], []))
    assert found['gradients'] == [None] * 3


@pytest.mark.parametrize(
    ('wanted', 'computed'),
    [
        ((True, True, True), [True] * 4),
        ((True, False, True), [True, True, False, True]),
        ((False, True, True), [True, False, False, False]),
        ((False, False, False), [True, False, False, False]),
    ],
)
def test_first_weight_of_a_grouped_layer_speaks_for_all(
    wanted: tuple[bool, ...], computed: list[bool]
) -> None:
    layer = GroupedLinear(3, 16, 32, init_method=torch.nn.init.zeros_, params_dtype=torch.float32)
    found = rules.gradients_of_grouped(layer, wanted)
    assert [gradient is not None for gradient in found] == computed


def test_grouped_layer_has_the_gradients_of_a_layer_for_each_expert() -> None:
    class Single(torch.nn.Module):
        """The same product without a function of its own."""

        def __init__(self) -> None:
            super().__init__()
            for number in range(3):
                weight = torch.nn.Parameter(torch.zeros(32, 16))
                self.register_parameter(f'weight{number}', weight)

        def forward(self, tokens: torch.Tensor, splits: list[int]) -> torch.Tensor:
            parts = zip(tokens.split(splits), self.parameters(), strict=True)
            return torch.cat([part @ weight.t() for part, weight in parts])

    grouped = GroupedLinear(3, 16, 32, init_method=torch.nn.init.zeros_, params_dtype=torch.float32)
    found, expected = (
        rules.gradients_of_grouped(layer, (True,) * 3) for layer in (grouped, Single())
    )
    torch.testing.assert_close(found, expected)
