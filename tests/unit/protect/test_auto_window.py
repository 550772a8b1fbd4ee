# SPDX-License-Identifier: Apache-2.0
"""`auto` of a whole job: what ranks measure goes to all of them as a plan, and back.

How it is decided: `tests/unit/plan/test_auto_window.py`.
"""

import queue
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from moevement_ext.config import POPULARITY
from moevement_ext.plan.auto_window import AutoWindow, Measured
from moevement_ext.plan.replanning import Cycle, PlanParameters, WindowLoad
from moevement_ext.plan.strategy.moevement import MoEvement
from moevement_ext.plan.windows import budgets
from moevement_ext.protect.replanner import Replanner
from tests.unit.protect.test_planner import BYTES, WORLD, Stages, stages_of_a_job

pytestmark = pytest.mark.timed

DEADLINE_S = 120.0
LONGEST = 4
COPIES = 1
FAST = 100.0 * BYTES
"""Bytes a second: far more than is captured."""
SLOW = 2.0 * BYTES
"""Of a throttled holder. Half of it is a share that carries an operator an iteration."""


class Job:
    """Replanners of all ranks, with the planners of their stages, on one store."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._master = TCPStore(
            '127.0.0.1', 0, is_master=True, timeout=timedelta(seconds=DEADLINE_S)
        )
        self._adopted: list[queue.Queue[Cycle]] = [queue.Queue() for _ in range(WORLD)]
        self._decided: queue.Queue[PlanParameters | None] = queue.Queue()
        self.present = list(stages.first)
        self._began = 0
        self.replanners = [self._start(rank) for rank in range(WORLD)]

    def _start(self, rank: int) -> Replanner:
        planner = self._stages.planners[rank]

        def shortest(seen: Measured) -> int | None:
            rates = seen.copy_bytes_per_s, seen.send_bytes_per_s
            carried = budgets(seen.iteration_s, *rates, copies=COPIES)
            return planner.shortest_window(carried, LONGEST)

        auto = AutoWindow(shortest, LONGEST)
        strategy = MoEvement(POPULARITY, LONGEST, auto, change=0.1, fraction=0.25)

        def decided(present: PlanParameters, loads: Sequence[WindowLoad]) -> PlanParameters | None:
            chosen = strategy.next(present, loads)
            self._decided.put(chosen)
            return chosen

        return Replanner(
            TCPStore('127.0.0.1', self._master.port, is_master=False),
            rank,
            WORLD,
            self.present[rank],
            decided,
            planner.next_plan,
            self._adopted[rank].put,
        )

    def train(self, sent: list[float], windows: int) -> list[int]:
        """Windows of all ranks, which send at these rates; the result is W after each."""
        found = []
        for _ in range(windows):
            start = self._begin_window()
            for rank, replanner in enumerate(self.replanners):
                replanner.observe(
                    WindowLoad(
                        start=start,
                        tokens={},
                        iteration_s=1.0,
                        copy_bytes_per_s=FAST,
                        send_bytes_per_s=sent[rank],
                    )
                )
            self._wait_until_decided(start)
            found.append(self.present[0].plan.window)
        return found

    def _begin_window(self) -> int:
        present = self.present[0]
        self._began = max(self._began + present.plan.window, present.origin)
        return self._began

    def _wait_until_decided(self, start: int) -> None:
        if self._decided.get(timeout=DEADLINE_S) is None:
            return
        self.present[0] = self._adopted[0].get(timeout=DEADLINE_S)
        for rank in range(1, WORLD):
            # They look after each window that they observe.
            self.replanners[rank].observe(
                WindowLoad(
                    start=start,
                    tokens={},
                    iteration_s=1.0,
                    copy_bytes_per_s=FAST,
                    send_bytes_per_s=FAST,
                )
            )
            self.present[rank] = self._adopted[rank].get(timeout=DEADLINE_S)


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job(stages_of_a_job())
    yield job
    for replanner in job.replanners:
        replanner.stop()


def test_throttled_holder_lengthens_the_windows_of_all_stages_for_a_while(job: Job) -> None:
    assert job.train([FAST] * WORLD, 1) == [1], 'the guess of the start is replaced'
    throttled = [FAST, FAST, SLOW, FAST]
    assert job.train(throttled, 6) == [1, 1, 4, 4, 4, 4]
    assert [len(plan.plan.slots) for plan in job.present] == [4] * WORLD
    assert len({plan.digest for plan in job.present}) == 1
    assert job.train([FAST] * WORLD, 5) == [4, 4, 1, 1, 1]
    assert [plan.version for plan in job.present] == [3] * WORLD
