# SPDX-License-Identifier: Apache-2.0
"""Planning anew outlives what it works with; what it decides: `tests/unit/plan`."""

import itertools
import queue
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import Store, TCPStore

from moevement_ext.config import POPULARITY
from moevement_ext.plan.replanning import Cycle, PlanParameters, WindowLoad
from moevement_ext.plan.strategy.moevement import MoEvement
from moevement_ext.protect.replanner import Replanner, publish
from tests.support.way import DistantStore
from tests.unit.protect.stage_plans import FIRST, planned, stage_plan
from tests.unit.replicate.peers import wait_for

pytestmark = pytest.mark.timed

DEADLINE_S = 120.0
"""How long a test waits for something that comes at once."""
BALANCED = {f'layer1.expert{expert}': 25 for expert in range(4)}

fixed = MoEvement(POPULARITY, 3, None, change=0.1, fraction=0.25).next


class Rank:
    """The replanner of a rank and the plans that it has adopted."""

    def __init__(
        self,
        store: Store,
        number: int,
        world: int,
        present: Cycle = FIRST,
        next_plan: Callable[[int, Store], Cycle | None] = planned,
    ) -> None:
        self._adopted: queue.Queue[Cycle] = queue.Queue()
        self.replanner = Replanner(
            store, number, world, present, fixed, next_plan, self._adopted.put
        )

    def observe(self, start: int, tokens: dict[str, int] = BALANCED) -> None:
        self.replanner.observe(
            WindowLoad(start=start, tokens=tokens, iteration_s=1.0, copy_bytes_per_s=1e9)
        )

    def adopted(self) -> Cycle:
        return self._adopted.get(timeout=DEADLINE_S)

    @property
    def waits(self) -> bool:
        return self._adopted.empty()


Start = Callable[..., Rank]


@pytest.fixture
def master() -> TCPStore:
    return TCPStore('127.0.0.1', 0, is_master=True, timeout=timedelta(seconds=DEADLINE_S))


@pytest.fixture
def start(master: TCPStore) -> Iterator[Start]:
    ranks: list[Rank] = []

    def one(number: int, world: int, *given: Any, store: Store | None = None) -> Rank:
        store = store or TCPStore('127.0.0.1', master.port, is_master=False)
        ranks.append(Rank(store, number, world, *given))
        return ranks[-1]

    yield one
    for rank in ranks:
        rank.replanner.stop()


def test_a_lost_connection_does_not_end_planning(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = DistantStore()
    rank = start(0, 1, store=server.connect(timedelta(seconds=DEADLINE_S)))
    rank.observe(0, {'layer1.expert0': 10, 'layer1.expert1': 30})
    assert rank.adopted().version == 1
    server.cut()
    rank.observe(8, {'layer1.expert0': 20, 'layer1.expert1': 20})
    wait_for(lambda: 'windows are not planned anew' in caplog.text)
    assert rank.waits
    server.repair()
    rank.observe(16, {'layer1.expert0': 30, 'layer1.expert1': 10})
    second = rank.adopted()
    assert (second.version, second.shares['layer1.expert0']) == (2, 0.75)
    assert caplog.text.count('out of reach') == 1
    assert 'cannot re-plan' not in caplog.text


def test_all_ranks_adopt_the_same_plans_in_order(start: Start, master: TCPStore) -> None:
    ranks = [start(number, 3) for number in range(3)]
    first = observed_until_adopted(ranks, 0, BALANCED)
    shifted = {**BALANCED, 'layer1.expert0': 100}
    second = observed_until_adopted(ranks, first[0].origin, shifted)
    assert first == [first[0]] * 3 and second == [second[0]] * 3
    assert (first[0].version, second[0].version) == (1, 2)
    assert second[0].shares['layer1.expert0'] == 100 / 175
    # A rank that joins is told a number, and finds under it what the plan was computed from.
    assert [planned(version, master) for version in (1, 2)] == [first[0], second[0]]


def observed_until_adopted(ranks: list[Rank], start: int, tokens: dict[str, int]) -> list[Cycle]:
    """Publish the same load window after window, as training does, until all have a new plan."""
    for turn in itertools.count():  # a few of them
        for rank in ranks:
            rank.observe(start + 2 * turn, tokens)
        time.sleep(0.1)
        if not any(rank.waits for rank in ranks):
            return [rank.adopted() for rank in ranks]
    raise AssertionError  # unreachable


def test_a_rank_that_joins_late_adopts_the_plan_in_force_at_once(
    start: Start, master: TCPStore
) -> None:
    """It takes the place of a lost one; without the plan its next windows would not count."""
    announced = PlanParameters(version=3, origin=12, window=2, shares={'layer1.expert0': 0.5})
    publish(master, announced)
    master.set('plan/newest', '3')
    plan = stage_plan(announced)
    late = start(1, 2, stage_plan(PlanParameters(version=1, window=4)))
    assert late.adopted() == plan, 'although it has observed nothing'
    knows = start(1, 2, plan)
    knows.replanner.stop()  # ends after it has looked
    assert knows.waits, 'it had that plan from the start'


def test_plan_not_handed_out_yet_is_requested_after_the_next_window(
    start: Start, master: TCPStore
) -> None:
    """The first rank of the stage was lost before it did."""
    publish(master, PlanParameters(version=1, origin=8, window=2))
    master.set('plan/newest', '1')
    asked: list[int] = []

    def handed_out_later(version: int, store: Store) -> Cycle | None:
        asked.append(version)
        return planned(version, store) if len(asked) > 1 else None

    rank = start(1, 2, FIRST, handed_out_later)
    wait_for(lambda: asked == [1])
    assert rank.waits
    rank.observe(0)
    assert rank.adopted().version == 1
    assert asked == [1, 1]
