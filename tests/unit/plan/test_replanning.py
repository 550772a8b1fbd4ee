# SPDX-License-Identifier: Apache-2.0
"""When windows are re-planned, and that all ranks take the same plan over."""

import queue
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import msgspec
import pytest
import torch
from torch.distributed import TCPStore

from moevement_ext.capture.copier import Copier
from moevement_ext.plan.replanning import PlanParameters, WindowLoad, decide_plan, shares_of
from moevement_ext.protect.replanner import Replanner, published_plan

DEADLINE_S = 20.0
BALANCED = {f'layer1.expert{expert}': 25 for expert in range(4)}


def load(start: int, tokens: dict[str, int], iteration_s: float = 1.0) -> WindowLoad:
    return WindowLoad(start, tokens, iteration_s, copy_bytes_per_s=1e9)


fixed = partial(decide_plan, best_window=None, change=0.10, fraction=0.25)


def test_shares_are_of_the_layer_and_summed_over_ranks() -> None:
    one = load(0, {'layer1.expert0': 1, 'layer1.expert1': 3, 'layer2.expert0': 5})
    two = load(0, {'layer1.expert0': 5, 'layer1.expert1': 3, 'layer2.expert1': 15})
    assert shares_of([one, two]) == {
        'layer1.expert0': 0.5,
        'layer1.expert1': 0.5,
        'layer2.expert0': 0.25,
        'layer2.expert1': 0.75,
    }


@pytest.mark.parametrize(
    ('tokens', 'replanned'),
    [
        ([25, 25, 25, 25], False),
        ([27, 23, 25, 25], False),  # two experts changed by 8 %
        ([29, 25, 23, 23], True),  # one of four changed by more than 10 %
    ],
)
def test_replanned_when_enough_experts_changed_enough(tokens: list[int], replanned: bool) -> None:
    present = PlanParameters(1, 0, 3, shares_of([load(0, BALANCED)]))
    seen = load(6, dict(zip(BALANCED, tokens, strict=True)))
    chosen = fixed(present, [seen])
    assert (chosen is not None) is replanned
    if chosen is not None:
        assert chosen.version == 2 and chosen.window == 3
        assert chosen.origin > seen.start and (chosen.origin - seen.start) % present.window == 0
        assert chosen.shares == shares_of([seen])


def test_dense_models_are_not_replanned_by_popularity() -> None:
    assert fixed(PlanParameters(0, 0, 3, {}), [load(0, {})]) is None


def test_auto_window_is_chosen_for_the_median_iteration_and_the_slowest_copy() -> None:
    asked = []

    def best(iteration_s: float, bytes_per_s: float) -> int:
        asked.append((iteration_s, bytes_per_s))
        return 5

    loads = [
        WindowLoad(4, BALANCED, seconds, rate)
        for seconds, rate in ((1.0, 3e9), (9.0, 1e9), (2.0, 2e9))
    ]
    present = PlanParameters(0, 0, 2, shares_of(loads))
    chosen = decide_plan(present, loads, best_window=best, change=0.1, fraction=0.25)
    assert asked == [(2.0, 1e9)]
    assert chosen == PlanParameters(1, 10, 5, present.shares)


def test_rates_that_were_never_measured_are_left_out() -> None:
    present = PlanParameters(0, 0, 2, shares_of([load(4, BALANCED)]))
    best = partial(
        decide_plan, present, best_window=lambda _, rate: int(rate), change=0.1, fraction=0.25
    )
    unmeasured = WindowLoad(4, BALANCED, 1.0, None)
    assert best([unmeasured, unmeasured]) is None
    chosen = best([unmeasured, WindowLoad(4, BALANCED, 1.0, 7.0)])
    assert chosen is not None and chosen.window == 7


def test_load_without_a_measured_rate_reaches_the_deciding_rank() -> None:
    copier = Copier(torch.device('cpu'))
    unmeasured = WindowLoad(4, BALANCED, 1.0, copier.bytes_per_s())
    copier.stop()
    assert msgspec.json.decode(msgspec.json.encode(unmeasured), type=WindowLoad) == unmeasured


def test_auto_window_stays_once_it_is_measured() -> None:
    loads = [load(4, BALANCED)]
    present = PlanParameters(1, 0, 2, shares_of(loads))
    assert decide_plan(present, loads, best_window=lambda *_: 5, change=0.1, fraction=0.25) is None


def test_all_ranks_adopt_the_same_plans_in_order() -> None:
    master = TCPStore('127.0.0.1', 0, is_master=True, timeout=timedelta(seconds=DEADLINE_S))
    adopted: list[queue.Queue[PlanParameters]] = [queue.Queue() for _ in range(3)]

    def start(rank: int) -> Replanner:
        store = TCPStore('127.0.0.1', master.port, is_master=False)
        return Replanner(store, rank, 3, PlanParameters(0, 0, 2, {}), fixed, adopted[rank].put)

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
    # A rank that joins is told a number, and finds the plan in force under it.
    begun = PlanParameters(0, 0, 2, {})
    assert [published_plan(master, version) for version in range(3)] == [begun, first[0], second[0]]


def test_counts_of_windows_that_were_overtaken_do_not_pile_up() -> None:
    """Rank 1 is always a window behind, so that no window is ever decided on."""
    master = TCPStore('127.0.0.1', 0, is_master=True, timeout=timedelta(seconds=DEADLINE_S))

    def start(rank: int) -> Replanner:
        store = TCPStore('127.0.0.1', master.port, is_master=False)
        return Replanner(store, rank, 2, PlanParameters(0, 0, 2, {}), fixed, lambda plan: None)

    replanners = [start(rank) for rank in range(2)]
    try:
        for window in range(20):
            replanners[0].observe(load(2 * window, BALANCED))
            _wait_until_published(master, 0, 2 * window)
            if window:
                replanners[1].observe(load(2 * window - 2, BALANCED))
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
    plan = PlanParameters(3, 12, 2, {'layer1.expert0': 0.5})
    master.set('plan/3', msgspec.json.encode(plan).decode())
    master.set('plan/newest', '3')
    adopted: queue.Queue[PlanParameters] = queue.Queue()

    def join(present: PlanParameters) -> Replanner:
        store = TCPStore('127.0.0.1', master.port, is_master=False)
        return Replanner(store, 1, 2, present, fixed, adopted.put)

    late = join(PlanParameters(1, 0, 4, {}))
    try:
        assert adopted.get(timeout=DEADLINE_S) == plan, 'although it has observed nothing'
    finally:
        late.stop()
    join(plan).stop()  # ends after it has looked
    assert adopted.empty(), 'it had that plan from the start'


def test_a_plan_that_cannot_be_read_does_not_end_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = TCPStore('127.0.0.1', 0, is_master=True, timeout=timedelta(seconds=DEADLINE_S))
    store.set('plan/newest', 'no number')
    adopted: queue.Queue[PlanParameters] = queue.Queue()
    replanner = Replanner(store, 0, 1, PlanParameters(0, 0, 2, {}), fixed, adopted.put)
    try:
        replanner.observe(load(0, dict(BALANCED)))
        assert adopted.get(timeout=DEADLINE_S).version == 1
    finally:
        replanner.stop()
    assert 'cannot re-plan' in caplog.text


def _observe_until_adopted(
    replanners: Sequence[Replanner],
    adopted: Sequence['queue.Queue[PlanParameters]'],
    start: int,
    tokens: dict[str, int],
) -> list[PlanParameters]:
    """Publish the same load window after window, as training does, until all have a new plan."""
    found: list[PlanParameters | None] = [None] * len(replanners)
    for turn in range(20):
        for replanner in replanners:
            replanner.observe(load(start + 2 * turn, tokens))
        for rank in range(len(replanners)):
            if found[rank] is None:
                try:
                    found[rank] = adopted[rank].get(timeout=0.3)
                except queue.Empty:
                    continue
        if all(plan is not None for plan in found):
            return [plan for plan in found if plan is not None]
    raise AssertionError(f'not adopted by all: {found}')
