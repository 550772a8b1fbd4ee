# SPDX-License-Identifier: Apache-2.0
"""One process of the job, worker or spare, with all that it starts itself."""

import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

TO_DIE_S = 120.0
"""After SIGKILL: to give back hundreds of GB takes its time; who waits in a driver never dies."""
_BOUND = Path(__file__).with_name('bound.py')


class Child(ABC):
    """A Python process in a session of its own (Ctrl-C does not reach it), bound to this one.

    It is killed when the *thread* that started it ends: so Linux has it. What it starts itself is
    not, but belongs to its process group.

    Attributes:
        pid: its process id.
        death: becomes readable when the process is dead.
        ended: `reap` was called.
    """

    def __init__(self, pid: int, death: int) -> None:
        self.pid = pid
        self.death = death
        self.ended = False
        self._killed_at: float | None = None

    def signal(self, number: int) -> None:
        """Send a signal to the process and what it started; to nobody once it was reaped."""
        if self.ended:
            return
        if number == signal.SIGKILL and self._killed_at is None:
            self._killed_at = time.monotonic()
        self._send(number)

    @property
    def to_die_s(self) -> float:
        """Seconds that are left to it to die; without end unless it was killed."""
        left = (
            math.inf if self._killed_at is None else self._killed_at + TO_DIE_S - time.monotonic()
        )
        return max(left, 0.0)

    def dies(self) -> bool:
        """Wait for the death of a process that was killed; False if it does not come."""
        poll = select.poll()
        poll.register(self.death, select.POLLIN)
        return bool(poll.poll(1000.0 * self.to_die_s))

    def ended_well(self) -> bool:
        """Wait until it is dead; True if it ended with exit status 0."""
        return self._how_it_ended() == 0

    def reap(self) -> int:
        """Wait until it is dead, kill what it left behind unless it ended well, and reap it.

        Returns:
            Exit status, or the negative number of the signal that killed it.
        """
        if not self.ended_well():
            self.signal(signal.SIGKILL)
        code = self._reap()
        self.ended = True
        os.close(self.death)
        return code

    @abstractmethod
    def _send(self, number: int) -> None:
        """Send a signal."""

    @abstractmethod
    def _how_it_ended(self) -> int:
        """Wait until it is dead; returns as `reap`, and the process id stays its own."""

    @abstractmethod
    def _reap(self) -> int:
        """Give its process id back."""


class OwnChild(Child):
    """One that this process has started.

    Attributes:
        output: read end of its stdout, if that is a pipe.
    """

    output: int | None

    @abstractmethod
    def close(self) -> None:
        """Close its pipes."""

    def _send(self, number: int) -> None:
        os.killpg(self.pid, number)  # the number is its own until it is reaped


def bound(command: Sequence[str]) -> list[str]:
    """The command that Linux kills when the thread that has started it ends."""
    program = shutil.which(command[0]) or command[0]
    isolated = [sys.executable, '-I', '-S', str(_BOUND), str(os.getpid())]
    return [*isolated, program, *command[1:]]


def how_it_ended(pid: int, options: int = 0) -> int:
    """Wait for a child of this process; exit status, or the negative number of a signal."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | options)
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


class SpawnedChild(OwnChild):
    """A process of a command.

    Args:
        command: arguments of the Python interpreter.
        environment: all of it.
        stdin, stdout, stderr, pass_fds: as for `subprocess.Popen`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | BinaryIO | None,
        stderr: int | BinaryIO | None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._process = subprocess.Popen(
            bound([sys.executable, *command]),
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        pid, output = self._process.pid, self._process.stdout
        super().__init__(pid, os.pidfd_open(pid))
        self.output = None if output is None else output.fileno()

    def tell(self, text: str) -> bool:
        """Write to its stdin, a pipe, and close it; False if nobody reads there any more."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode())
            self._process.stdin.close()
        except BrokenPipeError:
            return False
        return True

    def hear(self) -> bool:
        """Read a byte of its stdout, a pipe; False at the end."""
        assert self.output is not None
        return bool(os.read(self.output, 1))

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _how_it_ended(self) -> int:
        return how_it_ended(self.pid, os.WNOWAIT)

    def _reap(self) -> int:
        return self._process.wait()
