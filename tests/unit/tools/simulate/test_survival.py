# SPDX-License-Identifier: Apache-2.0
"""The report says of each number of replicas what its placement survives."""

import math

import pytest

from moevement_ext.replicate import placement
from tools.simulate.survival import survival_report


def test_report_has_a_ring_of_nodes_right() -> None:
    domains = [f'node{rank // 2}' for rank in range(12)]
    one, two, three = survival_report(domains, [1, 2, 3])
    assert [placed.holders for placed in (one, two, three)] == [1, 2, 3]
    assert one.load == (1, 1) and three.load == (3, 3)
    assert one.mean_distance is None
    assert [lost.failed for lost in one.survival] == [1, 2, 3]
    assert one.survival[0].probability == 1.0
    assert one.survival[1].probability == pytest.approx(1 - 6 / math.comb(6, 2))
    assert two.survival[1].probability == 1.0
    assert three.survival[2].probability == 1.0
    assert {lost.standard_error for lost in one.survival} == {0.0}


def test_sampled_probabilities_carry_their_error(monkeypatch: pytest.MonkeyPatch) -> None:
    domains = [f'node{rank}' for rank in range(12)]
    (exact,) = survival_report(domains, [3], replicas=[1])
    monkeypatch.setattr(placement, 'ENUMERATION_LIMIT', 10)
    (sampled,) = survival_report(domains, [3], replicas=[1], samples=5000)
    found = sampled.survival[0]
    assert 0 < found.standard_error < 0.01
    assert abs(found.probability - exact.survival[0].probability) < 5 * found.standard_error


def test_samples_that_lost_nothing_are_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, 'ENUMERATION_LIMIT', 10)
    domains = [f'node{rank}' for rank in range(12)]
    (sampled,) = survival_report(domains, [2], replicas=[2], samples=5000)
    found = sampled.survival[0]
    assert found.probability == 1 and 1e-4 < found.standard_error < 1e-3


def test_groups_and_links_are_reported() -> None:
    domains = ['a', 'b', 'c', 'd']
    (placed,) = survival_report(
        domains,
        [2],
        replicas=[2],
        groups=[[0, 2], [1, 3]],
        distance=lambda owner, holder: float(abs(owner - holder)),
    )
    assert placed.holders == 1
    assert placed.survival[0].probability == 1.0
    assert placed.mean_distance == pytest.approx(1.0)


def test_more_failures_than_domains_are_refused() -> None:
    with pytest.raises(ValueError, match='failed_domains is 3, of 2 domains'):
        survival_report(['a', 'b'], [3])
