# SPDX-License-Identifier: Apache-2.0
"""The current process of a rank, and its end before the supervisor judges it."""

import signal
from dataclasses import dataclass, field

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.launch.launcher_events import describe_exit
from moevement_ext.launch.remote import RemoteChild
from moevement_ext.membership.launch import PROCESS

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

    @property
    def how(self) -> str:
        return f'rank {self.worker.rank} (pid {self.worker.pid}) {self.fate}'

    @property
    def fate(self) -> str:
        host = self.worker.child.lost_with
        return f'was lost with host {host}' if host else describe_exit(self.code)
