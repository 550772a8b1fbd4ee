# SPDX-License-Identifier: Apache-2.0
"""The launcher's record of failures, recoveries and the end of the job.

Workers report the outcome of a recovery in the store, in one line. The launcher reads the store
only while a recovery is pending, so that a fault-free job adds no requests to the store.
"""

import time
from collections.abc import Callable

from torch.distributed import Store

from moevement_ext.events import Event
from moevement_ext.launch.launcher_events import (
    JobEnded,
    JobFailed,
    JobRecovered,
    NodeLost,
    StoreGone,
)
from moevement_ext.launch.output import say_of_launcher
from moevement_ext.launch.worker import BadEnd
from moevement_ext.membership.failures import (
    tell_cause,
    tell_end,
    tell_spares,
    told_recovered,
)


def print_event(event: Event) -> None:
    bad = isinstance(event, JobFailed | StoreGone | NodeLost)
    good = False if bad else None
    match event:
        case JobRecovered():
            good = event.nothing_lost
        case JobEnded():
            good = event.code == 0
    say_of_launcher(event, good)


class Outcome:
    """Failures of one job. The launcher's thread uses this; a `store` is as in `failures`."""

    def __init__(self, report: Callable[[Event], None], spares: Callable[[], str]) -> None:
        self._report = report
        self._spares = spares
        self._began = time.monotonic()
        self._failures = self._recoveries = 0
        self._told_spares = self._told = ''
        self._waits = False

    def lost(self, store: Store, end: BadEnd) -> None:
        """Record that this worker is about to be replaced; `DistError`: no store."""
        tell_end(store, end.worker.process, end.worker.rank, end.fate)
        self._failures += 1
        self._waits = True

    def all_lost(self, store: Store, cause: BadEnd, restarts: int) -> None:
        """Record the `restarts`-th restart of all workers, with this store; `DistError`: none."""
        how = f'(pid {cause.worker.pid}) {cause.fate}'
        tell_cause(store, restarts, cause.worker.rank, how)
        self._failures += 1
        self._waits = True
        self._told_spares = ''

    def look(self, store: Store) -> None:
        """Read a pending recovery's outcome, ten times a second; `DistError`: no store."""
        if not self._waits:
            return
        spares = self._spares()
        if spares != self._told_spares:
            tell_spares(store, spares)
            self._told_spares = spares
        line = told_recovered(store)
        if line and line != self._told:
            self._told = line
            self._waits = False
            self._recoveries += 1
            self._report(JobRecovered(line, spares))

    def ended(self, code: int) -> None:
        seconds = time.monotonic() - self._began
        self._report(JobEnded(code, seconds, self._failures, self._recoveries))
