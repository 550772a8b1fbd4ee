# SPDX-License-Identifier: Apache-2.0
"""Each stage plans its own windows, and all ranks know of each other what a recovery needs."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moevement_ext.capture.layout import OperatorSlices, TensorSlice
from moevement_ext.membership.place import Place
from moevement_ext.protect.planner import Planner

HELD = [
    {'embedding': 'rest', 'expert0': 'expert', 'expert1': 'expert'},
    {'embedding': 'rest', 'expert2': 'expert', 'expert3': 'expert'},
    {'layer': 'rest', 'router': 'router'},
    {'layer': 'rest', 'router': 'router'},
]
"""By rank, two of a stage. Those of the second stage hold the same state."""
BYTES = 1024
"""Of an operator in full."""
WORLD = len(HELD)


class Gathered:
    """What ranks that are threads give each other."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.given: dict[tuple[str, int], bytes] = {}


class GatheringThread:
    """An exchange of one of them."""

    def __init__(self, rank: int, gathered: Gathered) -> None:
        self._rank = rank
        self._gathered = gathered

    def __call__(self, name: str, own: bytes) -> list[bytes]:
        return self.among(name, own, range(WORLD), None)

    def among(self, name: str, own: bytes, ranks: Sequence[int], group: Any) -> list[bytes]:
        gathered, keys = self._gathered, [(name, rank) for rank in ranks]
        with gathered.changed:
            gathered.given[name, self._rank] = own
            gathered.changed.notify_all()
            assert gathered.changed.wait_for(lambda: gathered.given.keys() >= set(keys), 20.0)
            return [gathered.given[key] for key in keys]


def operators(rank: int) -> SimpleNamespace:
    def tensors(name: str, part: str, nbytes: int) -> tuple[TensorSlice, ...]:
        return (TensorSlice(name, name, part, 0, nbytes, torch.zeros(nbytes, dtype=torch.uint8)),)

    return SimpleNamespace(
        kinds=HELD[rank],
        slices={
            name: OperatorSlices(tensors(name, 'master', BYTES), tensors(name, 'weight', 1))
            for name in HELD[rank]
        },
        tied=['embedding'] if 'embedding' in HELD[rank] else [],
    )


@pytest.fixture(scope='module')
def planners() -> list[Planner]:
    gathered = Gathered()

    def planner(rank: int) -> Planner:
        stage = rank // 2
        members = [2 * stage, 2 * stage + 1]
        replicas = [other for other in members if stage and other != rank]
        place = Place(stage, members, None, replicas, interleaved=False)
        own = SimpleNamespace(number=rank, exchange=GatheringThread(rank, gathered))
        made = Planner(own, operators(rank), place)
        made.compare_windows(4)
        return made

    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(planner, range(WORLD)))


def order(planner: Planner, shares: dict[str, float]) -> list[str]:
    """Operators as a window of many slots captures them."""
    return [name for slot in planner.schedule(0, 5, shares).plan.slots for name in slot]


def test_all_know_stages_replicas_and_what_is_tied(planners: list[Planner]) -> None:
    for planner in planners:
        assert planner.stage_of == [0, 0, 1, 1]
        assert planner.replicas == [[], [], [3], [2]]
        assert planner.tied == {0}


def test_experts_of_the_ranks_take_turns_after_what_is_tied(planners: list[Planner]) -> None:
    for planner in planners[:2]:
        assert order(planner, {}) == ['embedding', 'expert0', 'expert2', 'expert1', 'expert3']


def test_what_is_tied_stays_first_whatever_is_popular(planners: list[Planner]) -> None:
    shares = {'expert0': 0.4, 'expert1': 0.3, 'expert2': 0.2, 'expert3': 0.1}
    for planner in planners[:2]:
        found = order(planner, shares)
        assert found[0] == 'embedding'
        assert [name for name in found if name in shares] == list(reversed(shares))


def test_plans_of_all_stages_count_together_and_others_do_not(planners: list[Planner]) -> None:
    def digests(window: int, shares: dict[str, float]) -> set[str]:
        return {planner.schedule(0, window, shares).digest for planner in planners}

    found = [digests(2, {}), digests(3, {}), digests(2, {'expert0': 0.5})]
    assert [len(one) for one in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3


def test_the_window_is_as_long_as_the_largest_stage_needs(planners: list[Planner]) -> None:
    """Rank 0 has three operators to distribute, and ranks of the other stage two."""
    for planner in planners:
        assert planner.shortest_window(3 * BYTES) == 1
        assert planner.shortest_window(2 * BYTES + 64) == 2
        assert planner.shortest_window(BYTES - 1) is None
