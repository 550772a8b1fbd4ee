# SPDX-License-Identifier: Apache-2.0
"""Injects one fault after another into a job and records each recovery."""

import statistics
import time
from collections.abc import Callable, Sequence

from ..lab.errors import LabError
from ..lab.evidence import (
    Recovery,
    Tier,
    done_again_s,
    launch_s,
    lost_iterations,
    persisted,
    recovery,
    start_up_s,
)
from ..lab.job import Injection, Job, Kind
from ..lab.run_log import Iteration
from .configuration import Configuration
from .drawing import Fault
from .results import Cell, FaultRecord, landed

LAST_ITERATIONS = 6
"""Last iterations of a job, without faults: a finished worker cannot help another to recover."""
FEWEST_ITERATIONS = 3
"""Iterations that a job needs for each fault, for the fault and for its analysis."""


class FaultInjector:
    """Injects faults into a job. Used from one thread.

    Args:
        job: a running job with events.
        last: number of its last iteration.
        configuration: configuration of the job.
        report: called with the record of each fault, and a line for people.
        pause_s: longest time from one iteration to the next without faults, which may include an
            evaluation and a dense save.
    """

    def __init__(
        self,
        job: Job,
        last: int,
        configuration: Configuration,
        report: Callable[[FaultRecord, str], None],
        pause_s: float,
    ) -> None:
        self._pause_s = pause_s
        self._job = job
        self._last = last
        self._configuration = configuration
        self._report = report
        self._back_at = 0.0
        self._from = 0
        self._known: set[int] = set()

    def inject_all(self, faults: Sequence[Fault]) -> None:
        """Inject until the job is nearly over, then let it end."""
        waiting: Fault | None = None
        # The first iteration shows how long a start takes, which the limit of a stall depends on.
        self._wait_for('protection', lambda: self._protected() and self._at() > 0)
        for number, fault in enumerate(faults):
            if not self._is_time(fault, faults_left=len(faults) - number):
                waiting = fault
                break
            self._one(fault)
        self._wait_for('the end', lambda: False)
        if waiting and waiting.kind is Kind.NODE and not self._protected():
            raise LabError(
                f'from iteration {self._from} to the end no window was persisted on all ranks, '
                f'waiting for {waiting}; see {self._job.folder}'
            )

    def _is_time(self, fault: Fault, faults_left: int) -> bool:
        """Wait for the moment of a fault; False if the job ends first."""
        share = (self._last - LAST_ITERATIONS - self._from) // faults_left - FEWEST_ITERATIONS
        due = self._from + min(fault.after, max(0, share))
        arrived = self._wait_for(
            'the next fault',
            lambda: self._at() >= due and (fault.kind is not Kind.NODE or self._protected()),
        )
        if not arrived or self._at() > self._last - LAST_ITERATIONS:
            return False
        time.sleep(fault.phase * self._iteration_s())
        return self._job.running() and self._at() <= self._last - LAST_ITERATIONS // 2

    def _one(self, fault: Fault) -> None:
        iteration = self._at()
        injections = self._inject(fault)
        last = injections[-1]
        found = self._recovery(last.time, str(fault))
        self._back_at, self._from = found.at, found.target
        events = self._job.events()
        firsts = [None, *[injections[0].time] * (len(injections) - 1)]
        cells = [
            Cell(landed(events, first, one.time, one.pid), one.kind)
            for first, one in zip(firsts, injections, strict=True)
        ]
        seconds = found.at - last.time
        record = FaultRecord(
            fault=str(fault),
            cells=cells,
            iteration=iteration,
            tier=found.tier,
            replayed=found.replayed,
            lost=lost_iterations(found, self._iterations(), events),
            seconds=round(seconds, 3),
            stall_s=round(max(0.0, seconds - self._expected_s(last, found.tier)), 3),
        )
        also = ''.join(f'; {death}' for death in self._new_deaths())
        self._report(
            record,
            f'{fault} after iteration {iteration}: {found.tier} in '
            f'{seconds:.1f} s, at {found.target} again, {found.replayed} replayed, '
            f'{record.lost} lost{also}',
        )

    def _expected_s(self, last: Injection, tier: Tier) -> float:
        """Seconds of a recovery without a stall: detection, start of processes, training."""
        events, detection_s = self._job.events(), self._configuration.detection_s(last.kind)
        if tier is not Tier.LOCALIZED:
            return detection_s + launch_s(events, self._iterations())
        return detection_s + start_up_s(events, last.time) + self._again_s(last)

    def _again_s(self, last: Injection) -> float:
        """Seconds of repeated evaluations and dense saves, limited to their fault-free duration."""
        return min(done_again_s(self._job.events(), last.time), self._pause_s)

    def _new_deaths(self) -> list[str]:
        new = {death.pid: death for death in self._job.unexpected if death.pid not in self._known}
        self._known.update(new)
        return [str(death) for death in new.values()]

    # Injecting

    def _inject(self, fault: Fault) -> list[Injection]:
        if fault.kind is Kind.DOUBLE and fault.apart_s:
            first = self._job.hurt(Kind.KILL, fault.victims[:1])
            time.sleep(fault.apart_s)
            return [first, self._job.hurt(Kind.DOUBLE, fault.victims[1:])]
        return [self._job.hurt(fault.kind, fault.victims)]

    # Waiting

    def _recovery(self, since: float, fault: str) -> Recovery:
        found: list[Recovery] = []

        def back() -> bool:
            job = self._job
            now = recovery(job.events(), job.pids(), since, self._iterations())
            found.extend([now] if now else [])
            return bool(found)

        if not self._wait_for(f'recovery after {fault}', back):
            raise LabError(f'the job ended, but did not report a recovery after: {fault}')
        return found[0]

    def _protected(self) -> bool:
        return persisted(self._job.events(), self._job.pids(), self._back_at)

    def _iterations(self) -> list[Iteration]:
        """Iterations in the log of the last rank, over all its processes, in order."""
        return self._job.read_log().iterations

    def _at(self) -> int:
        iterations = self._iterations()
        return iterations[-1].number if iterations else 0

    def _iteration_s(self) -> float:
        recent = [iteration.elapsed_ms / 1000 for iteration in self._iterations()[-8:]]
        return statistics.median(recent or [0.0])

    def _wait_for(self, what: str, happened: Callable[[], bool]) -> bool:
        """Wait until `happened`; False if the job ends first."""
        return any(happened() for _ in self._job.follow(what)) or happened()
