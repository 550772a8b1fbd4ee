# SPDX-License-Identifier: Apache-2.0
"""Experts that are owed tokens drop fewer tokens until the debt is made up."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import router as upstream

from megatron.moevement.state.router_tokens import MoreCapacity, by_layer

TOKENS, EXPERTS, LAYERS = 80, 2, 2
FACTOR = 0.5
CAPACITY, MORE = 20, 22


class Router(torch.nn.Module):
    """All tokens select all experts, with decreasing probability."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self._given = given

    def forward(self, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probs = torch.linspace(1, 0.1, TOKENS)[:, None].expand(TOKENS, EXPERTS)
        routed: tuple[torch.Tensor, torch.Tensor] = upstream.apply_router_token_dropping(
            probs, probs > 0, router_topk=1, capacity_factor=FACTOR, **self._given
        )
        return routed


@pytest.fixture
def routers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Router]:
    """Routers; upstream's function is restored afterwards."""
    dropping = 'apply_router_token_dropping'
    monkeypatch.setattr(upstream, dropping, getattr(upstream, dropping))
    return [Router(**getattr(request, 'param', {})) for _ in range(LAYERS)]


def taken(router: Router) -> list[int]:
    probs, routed = router(torch.zeros(1))
    assert torch.equal(probs > 0, routed)
    return routed.sum(dim=0).tolist()


def more(routers: list[Router], owed: list[list[float]]) -> MoreCapacity:
    capacity = MoreCapacity(routers, (LAYERS, EXPERTS), torch.device('cpu'))
    capacity.owe(owed)
    return capacity


def test_extra_capacity_ends_when_the_debt_is_made_up(routers: list[Router]) -> None:
    assert taken(routers[0]) == [CAPACITY, CAPACITY]
    capacity = more(routers, [[0, 3], [0, 0]])
    for owed in (True, True, False):  # 3, 1, -1 tokens are owed
        for _ in range(2):  # forward, and recomputation
            with torch.set_grad_enabled(False):
                assert taken(routers[0]) == [CAPACITY, MORE if owed else CAPACITY]
        assert taken(routers[0]) == [CAPACITY, MORE if owed else CAPACITY]
        assert taken(routers[1]) == [CAPACITY, CAPACITY]
        capacity.settle(committed=True)


def test_interrupted_iteration_does_not_reduce_the_debt(routers: list[Router]) -> None:
    capacity = more(routers, [[1, 0], [0, 0]])
    for _ in range(3):
        assert taken(routers[0]) == [MORE, CAPACITY]
        capacity.settle(committed=False)


def test_evaluation_has_no_extra_capacity(routers: list[Router]) -> None:
    more(routers, [[9, 9], [9, 9]])
    routers[1].eval()
    assert taken(routers[1]) == [CAPACITY, CAPACITY]
    assert taken(routers[0]) == [MORE, MORE]


@pytest.mark.parametrize('routers', [{'pad_to_capacity': True}], indirect=True)
def test_padding_to_capacity_disables_extra_capacity(routers: list[Router]) -> None:
    more(routers, [[9, 9], [9, 9]])
    assert taken(routers[0]) == [CAPACITY, CAPACITY]


def test_tokens_are_read_by_operator_name() -> None:
    tokens = {'layer0.expert1': 5.0, 'layer2.expert0': 7.0, 'elsewhere.expert0': 9.0}
    assert by_layer(['layer0', 'layer2'], 2, tokens) == [[0.0, 5.0], [7.0, 0.0]]
