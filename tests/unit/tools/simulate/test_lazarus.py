# SPDX-License-Identifier: Apache-2.0
"""Speeds with lost nodes that were computed by hand, and what replicas of experts are for."""

from math import exp

import pytest

from tools.model.layout import Layout
from tools.simulate.lazarus import Nodes, busiest, nodes_of, replicas


@pytest.mark.parametrize(
    ('nodes', 'lost', 'speeds'),
    [
        (Nodes(4, 4, 1, 32), 0, [1.0] * 6),
        (Nodes(4, 4, 1, 32), 1, [0.0, 1 / 2, 3 / 4, 3 / 4, 3 / 4, 3 / 4]),
        (Nodes(4, 4, 1, 32), 3, [0.0, 1 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        # Two sets of two nodes: the two that are lost are of one set in 2 of 6 cases.
        (Nodes(4, 2, 1, 32), 2, [0.0, 1 / 2, 1 / 6 + 2 / 3 / 2, 1 / 6, 1 / 2, 1 / 2]),
        (Nodes(4, 1, 2, 16), 1, [0.0, 1 / 2, 1 / 2, 0.0, 0.0, 3 / 4]),
    ],
)
def test_speeds_by_hand(nodes: Nodes, lost: int, speeds: list[float]) -> None:
    assert nodes.speeds(lost) == pytest.approx(speeds)


def test_goodput_is_a_mean_over_the_nodes_under_repair() -> None:
    nodes = nodes_of(Layout(ranks=512, pipeline=8, expert=8))
    assert nodes == (64, 8, 8, 64)
    wait, guests, *_, layout, lazarus = nodes.goodput(1.0, 1000.0, 100.0)
    assert wait == pytest.approx(exp(-1))
    assert guests == pytest.approx((1 + exp(-1)) / 2, abs=1e-6)
    assert layout == pytest.approx(0.8 * nodes.goodput(1.0, 1000.0, 1e-9)[-2])
    assert lazarus == pytest.approx(1 - 1 / 64)


def test_replicas_even_out_tokens_and_few_move() -> None:
    assert busiest([3, 1], [(0,), (1,)]) == 1.5
    assert busiest([3, 1], [(0, 0), (0, 1)]) == 1.0
    plain, slots, moved = replicas(16, 4, 12, 0.05)
    assert 1 < slots < plain
    assert 0 < moved < 1 / 4
