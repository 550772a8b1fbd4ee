# SPDX-License-Identifier: Apache-2.0
"""Injects one fault after another into a job and records each recovery."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..lab.errors import LabError
from ..lab.evidence import (
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


@dataclass
class FaultInjector:
    """Injects faults into a running job with events. Used from one thread."""

    job: Job
    last: int
    """Number of its last iteration."""
    configuration: Configuration
    report: Callable[[FaultRecord, str], None]
    """Called with the record of each fault, and a line for people."""
    pause_s: float
    """Longest time from one iteration to the next without faults, which may include an evaluation
    and a dense save."""
    _back_at: float = 0.0
    _from: int = 0
    _known: set[int] = field(default_factory=set)

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
        self._wait_for('the end', lambda: None)
        if waiting and waiting.kind is Kind.NODE and not self._protected():
            raise LabError(
                f'from iteration {self._from} to the end no window was persisted on all ranks, '
                f'waiting for {waiting}; see {self.job.folder}'
            )

    def _is_time(self, fault: Fault, faults_left: int) -> bool:
        """Wait for the moment of a fault; False if the job ends first."""
        share = (self.last - LAST_ITERATIONS - self._from) // faults_left - FEWEST_ITERATIONS
        due = self._from + min(fault.after, max(0, share))
        arrived = self._wait_for(
            'the next fault',
            lambda: self._at() >= due and (fault.kind is not Kind.NODE or self._protected()),
        )
        if not arrived or self._at() > self.last - LAST_ITERATIONS:
            return False
        recent = [iteration.elapsed_ms / 1000 for iteration in self._iterations()[-8:]]
        time.sleep(fault.phase * statistics.median(recent or [0.0]))
        return self.job.running() and self._at() <= self.last - LAST_ITERATIONS // 2

    def _one(self, fault: Fault) -> None:
        iteration = self._at()
        first, *more = injections = self._inject(fault)
        last = injections[-1]
        found = self._wait_for(
            f'recovery after {fault}',
            lambda: recovery(self.job.events(), self.job.pids(), last.time, self._iterations()),
        )
        if not found:
            raise LabError(f'the job ended, but did not report a recovery after: {fault}')
        self._back_at, self._from = found.at, found.target
        events, seconds = self.job.events(), found.at - last.time
        record = FaultRecord(
            fault=str(fault),
            cells=[
                Cell(landed(events, since, one.time, one.pid), one.kind)
                for since, one in [(None, first), *((first.time, one) for one in more)]
            ],
            iteration=iteration,
            tier=found.tier,
            replayed=found.replayed,
            lost=lost_iterations(found, self._iterations(), events),
            seconds=round(seconds, 3),
            stall_s=round(max(0.0, seconds - self._expected_s(last, found.tier)), 3),
        )
        new = {death.pid: death for death in self.job.unexpected if death.pid not in self._known}
        self._known.update(new)
        self.report(
            record,
            f'{fault} after iteration {iteration}: {found.tier} in '
            f'{seconds:.1f} s, at {found.target} again, {found.replayed} replayed, '
            f'{record.lost} lost{"".join(f"; {death}" for death in new.values())}',
        )

    def _expected_s(self, last: Injection, tier: Tier) -> float:
        """Seconds of a recovery without a stall.

        Detection, start of processes, and repeated evaluations and dense saves, as far as these
        last no longer than without faults.
        """
        events, detection_s = self.job.events(), self.configuration.detection_s(last.kind)
        if tier is not Tier.LOCALIZED:
            return detection_s + launch_s(events, self._iterations())
        again_s = min(done_again_s(events, last.time), self.pause_s)
        return detection_s + start_up_s(events, last.time) + again_s

    def _inject(self, fault: Fault) -> list[Injection]:
        if fault.kind is Kind.DOUBLE and fault.apart_s:
            first = self.job.hurt(Kind.KILL, fault.victims[:1])
            time.sleep(fault.apart_s)
            return [first, self.job.hurt(Kind.DOUBLE, fault.victims[1:])]
        return [self.job.hurt(fault.kind, fault.victims)]

    def _protected(self) -> bool:
        return persisted(self.job.events(), self.job.pids(), self._back_at)

    def _iterations(self) -> list[Iteration]:
        """Iterations in the log of the last rank, over all its processes, in order."""
        return self.job.read_log().iterations

    def _at(self) -> int:
        iterations = self._iterations()
        return iterations[-1].number if iterations else 0

    def _wait_for[R](self, what: str, look: Callable[[], R]) -> R:
        """Wait until `look` finds something; what it finds after the job if that ends first."""
        return next((found for _ in self.job.follow(what) if (found := look())), None) or look()
