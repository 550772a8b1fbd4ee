# SPDX-License-Identifier: Apache-2.0
"""Strikes one job with one fault after the other and notes how it comes back."""

import signal
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tools.chaos.evidence import Recovery, lost_iterations, persisted, recovery
from tools.chaos.job import Job
from tools.chaos.plan import Fault, Kind
from tools.demo.failure import DemoError

LAST_ITERATIONS = 6
"""At the end of a job that are not struck: a finished worker cannot help another to recover."""
FEWEST_ITERATIONS = 3
"""Of a job, for each fault: what the strike and the survey of it take at least."""


class Outcome(NamedTuple):
    """What became of a fault."""

    fault: Fault
    iteration: int
    """The last one logged before the strike."""
    recovery: Recovery
    seconds: float
    """From the last strike until all ranks were back."""
    lost: int
    unexpected: list[str]
    """Workers that died without being struck."""

    def line(self) -> str:
        """For people."""
        back = self.recovery
        also = ''.join(f'; {death}' for death in self.unexpected)
        return (
            f'{self.fault} after iteration {self.iteration}: {back.tier} in {self.seconds:.1f} s, '
            f'at {back.target} again, {back.replayed} replayed, {self.lost} lost{also}'
        )


class Striker:
    """Strikes a job. One thread uses it.

    Args:
        job: runs and has events.
        last: number of its last iteration.
        report: called with each outcome.
    """

    def __init__(self, job: Job, last: int, report: Callable[[Outcome], None]) -> None:
        self._job = job
        self._last = last
        self._report = report
        self._back_at = 0.0
        self._from = 0

    def strike_all(self, faults: Sequence[Fault]) -> int:
        """Strike until the job is nearly over, then let it end; returns how many struck.

        Raises:
            DemoError: the job failed or stands still.
        """
        struck = 0
        self._wait_for('protection', self._protected)
        for number, fault in enumerate(faults):
            if not self._is_time(fault, faults_left=len(faults) - number):
                break
            self._report(self._strike(fault))
            struck += 1
        self._wait_for('the end', lambda: False)
        if struck < len(faults) and faults[struck].kind is Kind.NODE and not self._protected():
            raise DemoError(
                f'from iteration {self._from} to the end no window was persisted on all ranks, '
                f'waiting for {faults[struck]}; see {self._job.folder}'
            )
        return struck

    def _is_time(self, fault: Fault, faults_left: int) -> bool:
        """Wait for the moment of a fault; False if the job is over before."""
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

    def _strike(self, fault: Fault) -> Outcome:
        iteration, deaths = self._at(), len(self._job.unexpected)
        if fault.kind is Kind.NODE:
            struck_at = self._job.strike_node(self._job.config.node_of(fault.victims[0]))
        elif fault.kind is Kind.STOP:
            struck_at = self._job.strike(fault.victims, signal.SIGSTOP)
        elif fault.apart_s:
            self._job.strike(fault.victims[:1], signal.SIGKILL)
            time.sleep(fault.apart_s)
            struck_at = self._job.strike(fault.victims[1:], signal.SIGKILL)
        else:
            struck_at = self._job.strike(fault.victims, signal.SIGKILL)
        found = self._recovery(struck_at, str(fault))
        self._back_at, self._from = found.at, found.target
        return Outcome(
            fault=fault,
            iteration=iteration,
            recovery=found,
            seconds=found.at - struck_at,
            lost=lost_iterations(found, self._job.iterations()),
            unexpected=[str(death) for death in self._job.unexpected[deaths:]],
        )

    def _recovery(self, struck_at: float, fault: str) -> Recovery:
        found: list[Recovery] = []

        def back() -> bool:
            job = self._job
            now = recovery(job.events(), job.pids(), struck_at, job.iterations())
            found.extend([now] if now else [])
            return bool(found)

        if not self._wait_for(f'recovery after {fault}', back):
            raise DemoError(f'the job ended, but did not report a recovery after: {fault}')
        return found[0]

    def _protected(self) -> bool:
        """Every present worker has seen a window become persisted since the last recovery."""
        return persisted(self._job.events(), self._job.pids(), self._back_at)

    def _at(self) -> int:
        iterations = self._job.iterations()
        return iterations[-1].number if iterations else 0

    def _iteration_s(self) -> float:
        recent = [iteration.elapsed_ms / 1000 for iteration in self._job.iterations()[-8:]]
        return statistics.median(recent or [0.0])

    def _wait_for(self, what: str, happened: Callable[[], bool]) -> bool:
        """Wait until something happens; False if the job ends before."""
        return any(happened() for _ in self._job.follow(what)) or happened()
