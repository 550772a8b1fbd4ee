# SPDX-License-Identifier: Apache-2.0
"""The present process of a rank, and an end of it that is still to be judged."""

import signal
from dataclasses import dataclass, field

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.launch.launcher_events import describe_exit
from moevement_ext.launch.remote import RemoteChild

_NOT_ITS_FAULT = (EXIT_WHOLE_JOB, -signal.SIGKILL, -signal.SIGTERM)


@dataclass
class Worker:
    """The present process of a rank."""

    rank: int
    child: RemoteChild = field(init=False)
    finished: bool = False
    """It ended with exit status 0, or with what it had announced."""
    errors: list[float] = field(default_factory=list)
    """When the program itself gave up (seconds of the monotonic clock)."""

    @property
    def pid(self) -> int:
        """Process id of the present life."""
        return self.child.pid

    @property
    def restarts(self) -> int:
        """How often the rank was restarted."""
        return self.child.restarts

    def last_words(self) -> str:
        """What a dead worker printed last, to be shown after the reason of a failure."""
        if not self.child.last_lines:
            return '; it printed nothing.'
        return '; its last lines:\n' + '\n'.join(f'    {line}' for line in self.child.last_lines)


@dataclass(frozen=True)
class BadEnd:
    """A worker is gone, and neither replaced nor found to have finished yet."""

    worker: Worker
    code: int
    """Exit status, or the negative number of the signal that killed it."""
    at: float
    """When it was seen (seconds of the monotonic clock)."""

    @property
    def is_error(self) -> bool:
        """The program itself gave up; perhaps because another worker is lost."""
        return self.code not in _NOT_ITS_FAULT

    @property
    def how(self) -> str:
        """What to tell a person."""
        return f'rank {self.worker.rank} (pid {self.worker.pid}) {self.fate}'

    @property
    def fate(self) -> str:
        """The same without the name of the process."""
        host = self.worker.child.lost_with
        return f'was lost with host {host}' if host else describe_exit(self.code)
