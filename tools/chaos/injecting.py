# SPDX-License-Identifier: Apache-2.0
"""Injects one fault after another into a job and records each recovery."""

import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..lab.evidence import lost_iterations, persisted, recovery
from ..lab.job import Job, Kind
from ..lab.programs import LabError
from ..lab.run_log import Iteration
from .drawing import Fault
from .results import FaultRecord

LAST_ITERATIONS = 6
"""Last iterations of a job, without faults: a finished worker cannot help another to recover."""
FEWEST_ITERATIONS = 3
"""Iterations that a job needs for each fault, for the fault and for its analysis."""

# Faults that delete memory of nodes, wait for windows on others, or keep windows from persisting.
_MEMORY = Kind.NODE, Kind.AWAY, Kind.BACK, Kind.COORDINATOR, Kind.STILL
AT_COORDINATOR = {Kind.COORDINATOR: signal.SIGKILL, Kind.STILL: signal.SIGSTOP}


@dataclass
class FaultInjector:
    """Injects faults into a running job with events. Used from one thread."""

    job: Job
    last: int
    """Number of its last iteration."""
    report: Callable[[FaultRecord, str], None]
    """Called with the record of each fault, and a line for people."""
    _back_at: float = 0.0
    _from: int = 0
    _known: set[int] = field(default_factory=set)

    def inject_all(self, faults: Sequence[Fault]) -> None:
        """Inject until the job is nearly over, then let it end."""
        waiting: Fault | None = None
        self._wait_for('protection', lambda: self._protected() and self._at() > 0)
        for number, fault in enumerate(faults):
            if not self._is_time(fault, faults_left=len(faults) - number):
                waiting = fault
                break
            self._one(fault)
        self._wait_for('the end', lambda: None)
        if waiting and waiting.kind in _MEMORY and not self._protected():
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
            lambda: self._at() >= due and (fault.kind not in _MEMORY or self._protected()),
        )
        if not arrived or self._at() > self.last - LAST_ITERATIONS:
            return False
        recent = [iteration.elapsed_ms / 1000 for iteration in self._iterations()[-8:]]
        time.sleep(fault.phase * statistics.median(recent or [0.0]))
        return self.job.running() and self._at() <= self.last - LAST_ITERATIONS // 2

    def _one(self, fault: Fault) -> None:
        iteration = self._at()
        struck_at = self._inject(fault)
        found = self._wait_for(
            f'recovery after {fault}',
            lambda: recovery(self.job.events(), self.job.pids(), struck_at, self._iterations()),
        )
        if not found:
            raise LabError(f'the job ended, but did not report a recovery after: {fault}')
        self._back_at, self._from = found.at, found.target
        events, seconds = self.job.events(), found.at - struck_at
        record = FaultRecord(
            fault=str(fault),
            iteration=iteration,
            tier=found.tier,
            replayed=found.replayed,
            lost=lost_iterations(found, self._iterations(), events),
            seconds=round(seconds, 3),
        )
        new = {death.pid: death for death in self.job.unexpected if death.pid not in self._known}
        self._known.update(new)
        self.report(
            record,
            f'{fault} after iteration {iteration}: {found.tier} in '
            f'{seconds:.1f} s, at {found.target} again, {found.replayed} replayed, '
            f'{record.lost} lost{"".join(f"; {death}" for death in new.values())}',
        )

    def _inject(self, fault: Fault) -> float:
        """Inject a fault; returns the time of the last signal."""
        if fault.kind in AT_COORDINATOR:
            return self._inject_at_coordinator(fault)
        if fault.kind is Kind.DOUBLE and fault.apart_s:
            self.job.hurt(Kind.KILL, fault.victims[:1])
            time.sleep(fault.apart_s)
            return self.job.hurt(Kind.DOUBLE, fault.victims[1:])
        return self.job.hurt(fault.kind, fault.victims)

    def _inject_at_coordinator(self, fault: Fault) -> float:
        number = AT_COORDINATOR[fault.kind]
        if fault.apart_s < 0:
            struck_at = self.job.hurt(Kind.KILL, fault.victims)
            time.sleep(-fault.apart_s)
            self.job.signal_coordinator(number)
        else:
            self.job.signal_coordinator(number)
            time.sleep(fault.apart_s)
            struck_at = self.job.hurt(Kind.KILL, fault.victims)
        return struck_at

    def _protected(self) -> bool:
        return persisted(self.job.events(), self.job.pids(), self._back_at)

    def _iterations(self) -> list[Iteration]:
        """Iterations in the log of the last rank, over all its processes, in order."""
        return self.job.read_log().iterations

    def _at(self) -> int:
        iterations = self._iterations()
        return iterations[-1].number if iterations else 0

    def _wait_for[R](self, what: str, find: Callable[[], R]) -> R:
        """Wait until `find` finds something; what it finds after the job if that ends first."""
        return next((found for _ in self.job.follow(what) if (found := find())), None) or find()
