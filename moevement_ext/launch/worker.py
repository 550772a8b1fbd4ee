# SPDX-License-Identifier: Apache-2.0
"""Workers and their failures: which are replaced, and the record of failures and recoveries.

Workers report the outcome of a recovery in the store, in one line. The launcher reads the store
only while a recovery is pending, so that a fault-free job adds no requests to the store.
"""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch.distributed import Store

from moevement_ext.errors import EXIT_OTHER_BITS, EXIT_USER_ERROR, EXIT_WHOLE_JOB, LaunchError
from moevement_ext.events import Event
from moevement_ext.launch.launcher_events import (
    JobEnded,
    JobFailed,
    JobRecovered,
    NodeLost,
    StoreGone,
    describe_exit,
    name_of,
)
from moevement_ext.launch.output import say_of_launcher
from moevement_ext.launch.remote import RemoteChild
from moevement_ext.membership.mailbox import (
    PROCESS,
    read_joining,
    read_recovery,
    read_survivors,
    write_cause,
    write_death,
)

_NOT_ITS_FAULT = (EXIT_WHOLE_JOB, -signal.SIGKILL, -signal.SIGTERM)


@dataclass
class Worker:
    """The current process of a rank."""

    rank: int
    child: RemoteChild = field(init=False)
    finished: bool = False
    """The process ended with exit status 0, or with the exit status that it announced."""
    errors: list[float] = field(default_factory=list)
    """Times when the program itself failed (seconds of the monotonic clock)."""

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def process(self) -> int:
        return int(self.child.order.variables[PROCESS])

    @property
    def restarts(self) -> int:
        return self.child.restarts

    def last_words(self) -> str:
        """The last output of a dead worker, as a suffix of an error message."""
        if not self.child.last_lines:
            return '; it printed nothing.'
        return '; its last lines:\n' + '\n'.join(f'    {line}' for line in self.child.last_lines)


@dataclass(frozen=True)
class BadEnd:
    """A worker's end that the supervisor has not judged yet."""

    worker: Worker
    code: int
    at: float
    """When the supervisor saw the end (seconds of the monotonic clock)."""

    @property
    def is_error(self) -> bool:
        """True if the program itself failed, perhaps because of another lost worker."""
        return self.code not in _NOT_ITS_FAULT

    @cached_property  # also once another process has this rank
    def how(self) -> str:
        return f'{name_of(self.worker.rank, self.worker.pid)} {self.fate}'

    @property
    def fate(self) -> str:
        child = self.worker.child
        if child.moves_to:
            return f'moves to host {child.moves_to}'
        if child.lost_with:
            return f'was lost with host {child.lost_with}'
        return describe_exit(self.code)


_MAX_ERRORS = 3
_ERRORS_WITHIN_S = 600.0
# Limit for a replacement to import the program and join; survivors wait longer.
_TO_JOIN_S = 300.0


def refuse_mistakes(ends: Sequence[BadEnd], workers: Sequence[Worker]) -> None:
    """Refuse to replace a worker after a user error, with a `LaunchError`.

    A user error exists from the start, so a new worker would repeat it. After a replacement
    of any of the `workers` the same exit status may have another cause, such as too little
    memory on one node, and is no longer refused. A recovery that computes other bits, with
    `--sparse-ckpt-verify stop`, ends the job at any time.
    """
    for end in ends:
        if end.code == EXIT_OTHER_BITS:
            raise LaunchError(
                f'{end.how}: a recovery computed other bits{end.worker.last_words()}', end.code
            )
        if end.code == EXIT_USER_ERROR and not any(worker.restarts for worker in workers):
            raise LaunchError(
                f'{end.how}: it refuses what it was started with{end.worker.last_words()}',
                EXIT_USER_ERROR,
            )


def refuse_useless(end: BadEnd, max_restarts: int, restarted: Sequence[Worker] = ()) -> None:
    """Raise `LaunchError` if the rank was restarted, or failed, too often.

    Errors count for their own rank. If all `restarted` workers restart, those of all ranks
    count together: a program that fails by itself may fail on another rank at each restart.
    """
    if end.is_error:
        if end.at not in end.worker.errors:  # an end is judged again after the loss of a store
            end.worker.errors.append(end.at)
        _refuse_errors(end, restarted)
    # Counted per rank: the loss of a node, or of the whole job, restarts up to hundreds of ranks.
    if end.worker.restarts >= max_restarts:
        raise LaunchError(f'{end.how} and --max-restarts {max_restarts} is used up.')


def _refuse_errors(end: BadEnd, restarted: Sequence[Worker]) -> None:
    since = time.monotonic() - _ERRORS_WITHIN_S
    own = sum(at > since for at in end.worker.errors)
    together = {
        worker.rank: sum(at > since for at in worker.errors)
        for worker in restarted
        if any(at > since for at in worker.errors)
    }
    if own >= _MAX_ERRORS:
        failed = f'it failed by itself {own} times'
    elif sum(together.values()) >= _MAX_ERRORS:
        ranks = ', '.join(map(str, sorted(together)))
        failed = f'ranks {ranks} failed by themselves {sum(together.values())} times in all'
    else:
        return
    raise LaunchError(
        f'{end.how}; {failed} within {_ERRORS_WITHIN_S / 60:.0f} minutes{end.worker.last_words()}'
    )


def late_workers(store: Store, living: Sequence[Worker]) -> list[Worker]:
    """Return the workers that have not joined in time and must be killed, each worker once.

    They hang before the rendezvous, where other ranks cannot detect it. Sends no request to
    the store before a worker can be late. The first process of a rank that joins may take any
    time: a cold start of the whole job may take long. `store` is the part of this launch;
    raises `DistError` if it does not answer.
    """
    overdue = [one for one in living if (one.child.joining_age_s or 0.0) > _TO_JOIN_S]
    if not (overdue and any(worker.restarts for worker in living) and read_survivors(store)):
        return []
    joined = {worker.rank: read_joining(store, worker.rank) for worker in overdue}
    for worker in overdue:
        worker.child.is_settled = True
    return [worker for worker in overdue if joined[worker.rank] not in (None, worker.process)]


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
    """Failures of one job. The launcher's thread uses this; a `store` is as in `mailbox`."""

    def __init__(self, report: Callable[[Event], None], spares: Callable[[], str]) -> None:
        self._report = report
        self._spares = spares
        self._began = time.monotonic()
        self._failures = self._recoveries = 0
        self._reported = ''
        self._waits = False

    def lost(self, store: Store, end: BadEnd) -> None:
        """Record that this worker is about to be replaced; `DistError`: no store."""
        write_death(store, end.worker.process, end.worker.rank, end.fate)
        self._failures += 1
        self._waits = True

    def all_lost(self, store: Store, cause: BadEnd, restarts: int) -> None:
        """Record the `restarts`-th restart of all workers, with this store; `DistError`: none."""
        rank = cause.worker.rank
        write_cause(store, restarts, rank, cause.how.removeprefix(f'rank {rank} '))
        self._failures += 1
        self._waits = True

    def poll(self, store: Store) -> None:
        """Read a pending recovery's outcome, ten times a second; `DistError`: no store."""
        if not self._waits:
            return
        line = read_recovery(store)
        if line and line != self._reported:
            self._reported = line
            self._waits = False
            self._recoveries += 1
            self._report(JobRecovered(line, self._spares()))

    def ended(self, code: int) -> None:
        seconds = time.monotonic() - self._began
        self._report(JobEnded(code, seconds, self._failures, self._recoveries))
