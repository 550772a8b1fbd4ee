# SPDX-License-Identifier: Apache-2.0
"""Planning anew outlives what it works with; what it decides: `tests/unit/plan`."""

import queue
import time
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import pytest
from torch.distributed import Store, TCPStore

from moevement_ext.config import POPULARITY
from moevement_ext.plan.replanning import Cycle, PlanParameters, WindowLoad
from moevement_ext.plan.strategy.moevement import MoEvement
from moevement_ext.protect.replanner import Replanner, publish
from tests.unit.protect.distant_store import DistantStore
from tests.unit.protect.stage_plans import FIRST, planned, stage_plan
from tests.unit.replicate.peers import wait_for

pytestmark = pytest.mark.timed

DEADLINE_S = 120.0
"""How long a test waits for something that comes at once."""
BALANCED = {f'layer1.expert{expert}': 25 for expert in range(4)}

fixed = MoEvement(POPULARITY, 3, None, change=0.1, fraction=0.25).next


def load(start: int, *tokens: int) -> WindowLoad:
    return seen(start, {f'layer1.expert{expert}': count for expert, count in enumerate(tokens)})


def seen(start: int, tokens: dict[str, int]) -> WindowLoad:
    return WindowLoad(start=start, tokens=tokens, iteration_s=1.0, copy_bytes_per_s=1e9)


def test_a_lost_connection_does_not_end_planning(caplog: pytest.LogCaptureFixture) -> None:
    server = DistantStore()
    adopted: queue.Queue[Cycle] = queue.Queue()
    replanner = Replanner(
        server.connect(timedelta(seconds=DEADLINE_S)),
        0,
        1,
        FIRST,
        fixed,
        planned,
        adopted.put,
    )
    try:
        replanner.observe(load(0, 10, 30))
        assert adopted.get(timeout=DEADLINE_S).version == 1
        server.cut()
        replanner.observe(load(8, 20, 20))
        wait_for(lambda: 'windows are not planned anew' in caplog.text)
        assert adopted.empty()
        server.repair()
        replanner.observe(load(16, 30, 10))
        second = adopted.get(timeout=DEADLINE_S)
        assert (second.version, second.shares['layer1.expert0']) == (2, 0.75)
    finally:
        replanner.stop()
    assert caplog.text.count('out of reach') == 1
    assert 'cannot re-plan' not in caplog.text


def test_all_ranks_adopt_the_same_plans_in_order() -> None:
    master = TCPStore('127.0.0.1', 0, is_master=True, timeout=timedelta(seconds=DEADLINE_S))
    adopted: list[queue.Queue[Cycle]] = [queue.Queue() for _ in range(3)]

    def start(rank: int) -> Replanner:
        store = TCPStore('127.0.0.1', master.port, is_master=False)
        return Replanner(store, rank, 3, FIRST, fixed, planned, adopted[rank].put)

    replanners = [start(rank) for rank in range(3)]
    try:
        first = _observe_until_adopted(replanners, adopted, 0, dict(BALANCED))
        shifted = {**BALANCED, 'layer1.expert0': 100}
        second = _observe_until_adopted(replanners, adopted, first[0].origin, shifted)
    finally:
        for replanner in replanners:
            replanner.stop()
    assert first == [first[0]] * 3 and second == [second[0]] * 3
    assert (first[0].version, second[0].version) == (1, 2)
    assert second[0].shares['layer1.expert0'] == 100 / 175
    # A rank that joins is told a number, and finds under it what the plan was computed from.
    assert [planned(version, master) for version in (1, 2)] == [first[0], second[0]]


def test_loads_of_many_ranks_are_read_some_at_a_time() -> None:
    """The store serves no other client while it collects an answer."""
    asked: list[int] = []

    class Watched(TCPStore):
        def multi_get(self, keys: list[str]) -> list[bytes]:
            asked.append(len(keys))
            return super().multi_get(keys)

    store = Watched('127.0.0.1', 0, is_master=True, timeout=timedelta(seconds=DEADLINE_S))
    for rank in range(1, 600):
        store.set(f'load/{rank}', msgspec.json.encode(seen(0, {})).decode())
    store.add('loads/0', 599)
    adopted: queue.Queue[Cycle] = queue.Queue()
    replanner = Replanner(store, 0, 600, FIRST, fixed, planned, adopted.put)
    try:
        replanner.observe(seen(0, dict(BALANCED)))
        assert adopted.get(timeout=DEADLINE_S).version == 1
    finally:
        replanner.stop()
    assert sum(asked) == 600 and max(asked) <= 256


def test_counts_of_outdated_windows_are_deleted() -> None:
    """Rank 1 is always a window behind, so that no window is ever decided on."""
    master = TCPStore('127.0.0.1', 0, is_master=True, timeout=timedelta(seconds=DEADLINE_S))

    def start(rank: int) -> Replanner:
        store = TCPStore('127.0.0.1', master.port, is_master=False)
        return Replanner(store, rank, 2, FIRST, fixed, planned, lambda plan: None)

    replanners = [start(rank) for rank in range(2)]
    try:
        for window in range(20):
            replanners[0].observe(seen(2 * window, BALANCED))
            _wait_until_published(master, 0, 2 * window)
            if window:
                replanners[1].observe(seen(2 * window - 2, BALANCED))
                _wait_until_published(master, 1, 2 * window - 2)
        keys = [key for key in master.list_keys() if key.startswith('loads/')]
    finally:
        for replanner in replanners:
            replanner.stop()
    assert 0 < len(keys) <= 6


def _wait_until_published(store: TCPStore, rank: int, start: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    published = None
    while published != start:
        assert time.monotonic() < deadline
        found = msgspec.json.decode(store.get(f'load/{rank}'), type=WindowLoad)
        published = found.start if store.check([f'loads/{start}']) else None


def test_a_rank_that_joins_late_adopts_the_plan_in_force_at_once() -> None:
    """It takes the place of a lost one; without the plan its next windows would not count."""
    master = TCPStore('127.0.0.1', 0, is_master=True, timeout=timedelta(seconds=DEADLINE_S))
    announced = PlanParameters(version=3, origin=12, window=2, shares={'layer1.expert0': 0.5})
    publish(master, announced)
    master.set('plan/newest', '3')
    plan = stage_plan(announced)
    adopted: queue.Queue[Cycle] = queue.Queue()

    def join(present: Cycle) -> Replanner:
        store = TCPStore('127.0.0.1', master.port, is_master=False)
        return Replanner(store, 1, 2, present, fixed, planned, adopted.put)

    late = join(stage_plan(PlanParameters(version=1, window=4)))
    try:
        assert adopted.get(timeout=DEADLINE_S) == plan, 'although it has observed nothing'
    finally:
        late.stop()
    join(plan).stop()  # ends after it has looked
    assert adopted.empty(), 'it had that plan from the start'


def test_plan_not_handed_out_yet_is_requested_after_the_next_window() -> None:
    """The first rank of the stage was lost before it did."""
    store = TCPStore('127.0.0.1', 0, is_master=True, timeout=timedelta(seconds=DEADLINE_S))
    publish(store, PlanParameters(version=1, origin=8, window=2))
    store.set('plan/newest', '1')
    asked: queue.Queue[int] = queue.Queue()
    adopted: queue.Queue[Cycle] = queue.Queue()

    def handed_out_later(version: int, store: Store) -> Cycle | None:
        asked.put(version)
        return planned(version, store) if asked.qsize() > 1 else None

    replanner = Replanner(store, 1, 2, FIRST, fixed, handed_out_later, adopted.put)
    try:
        wait_for(lambda: asked.qsize() == 1)
        assert adopted.empty()
        replanner.observe(seen(0, BALANCED))
        assert adopted.get(timeout=DEADLINE_S).version == 1
    finally:
        replanner.stop()
    assert asked.qsize() == 2


def test_a_plan_that_cannot_be_read_does_not_end_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = TCPStore('127.0.0.1', 0, is_master=True, timeout=timedelta(seconds=DEADLINE_S))
    store.set('plan/newest', 'no number')
    adopted: queue.Queue[Cycle] = queue.Queue()
    replanner = Replanner(store, 0, 1, FIRST, fixed, planned, adopted.put)
    try:
        replanner.observe(seen(0, BALANCED))
        assert adopted.get(timeout=DEADLINE_S).version == 1
    finally:
        replanner.stop()
    assert 'cannot re-plan' in caplog.text


def _observe_until_adopted(
    replanners: Sequence[Replanner],
    adopted: Sequence['queue.Queue[Cycle]'],
    start: int,
    tokens: dict[str, int],
) -> list[Cycle]:
    """Publish the same load window after window, as training does, until all have a new plan."""
    found: list[Cycle | None] = [None] * len(replanners)
    for turn in range(200):  # as long as it takes, which is a few of them
        for replanner in replanners:
            replanner.observe(seen(start + 2 * turn, tokens))
        for rank in range(len(replanners)):
            if found[rank] is None:
                try:
                    found[rank] = adopted[rank].get(timeout=0.3)
                except queue.Empty:
                    continue
        if all(plan is not None for plan in found):
            return [plan for plan in found if plan is not None]
    raise AssertionError(f'not adopted by all: {found}')
