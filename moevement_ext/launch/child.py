# SPDX-License-Identifier: Apache-2.0
"""A process of the job with its descendants, and the event loop that waits for processes."""

import math
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

TO_DIE_S = 120.0
"""Limit for a death after SIGKILL: freeing hundreds of GB takes long, and a process that is blocked
in a driver never dies."""
_BOUND = Path(__file__).with_name('bound.py')


class Child(ABC):
    """A Python process in its own session (out of reach of Ctrl-C), bound to this process.

    Linux kills the process when the *thread* that started it ends, or for a fork of a template,
    this process. The kernel does not kill the descendants of the process, which are in its process
    group. `death` becomes readable when the process is dead; `ended` is set by `reap`.
    """

    def __init__(self, pid: int, death: int) -> None:
        self.pid = pid
        self.death = death
        self.ended = False
        self._killed_at: float | None = None

    def signal(self, number: int) -> None:
        """Send a signal to the process group; does nothing after `reap`."""
        if self.ended:
            return
        if number == signal.SIGKILL and self._killed_at is None:
            self._killed_at = time.monotonic()
        self._send(number)

    @property
    def to_die_s(self) -> float:
        """Seconds left for a killed process to die; infinity unless it was killed."""
        left = (
            math.inf if self._killed_at is None else self._killed_at + TO_DIE_S - time.monotonic()
        )
        return max(left, 0.0)

    def dies(self) -> bool:
        """Wait for the death of a killed process; False if it does not die in time."""
        return is_ready(self.death, self.to_die_s)

    def ended_well(self) -> bool:
        """Wait until the process is dead; True if its exit status is 0."""
        return self._how_it_ended() == 0

    def reap(self) -> int:
        """Wait for the death of the process and reap it; after an error, also kill its descendants.

        Returns the exit status, or the negative number of the signal that killed it.
        """
        if not self.ended_well():
            self.signal(signal.SIGKILL)
        code = self._reap()
        self.ended = True
        os.close(self.death)
        return code

    def _send(self, number: int) -> None:
        os.killpg(self.pid, number)  # the id is not reused before the child is reaped

    @abstractmethod
    def _how_it_ended(self) -> int:
        """Wait for the death; return as `reap`, but keep the process id reserved."""

    @abstractmethod
    def _reap(self) -> int: ...


def is_ready(fd: int, timeout_s: float | None = 0.0, event: int = select.POLLIN) -> bool:
    """Wait for a descriptor at most these seconds (None: forever); True if it is ready."""
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(None if timeout_s is None else 1000.0 * timeout_s))


def bound(command: Sequence[str]) -> list[str]:
    """Wrap a command so that Linux kills it when the thread that started it ends."""
    program = shutil.which(command[0]) or command[0]
    isolated = [sys.executable, '-I', '-S', str(_BOUND), str(os.getpid())]
    return [*isolated, program, *command[1:]]


def how_it_ended(pid: int, options: int = 0) -> int:
    """Wait for a child process; returns its exit status, or the negative number of a signal."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | options)
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


class ForkedChild(Child):
    """A child of this process, forked here or by a template."""

    def __init__(self, pid: int) -> None:
        try:
            death = os.pidfd_open(pid)
        except OSError:  # too many open files: its death could not be detected
            os.kill(pid, signal.SIGKILL)
            how_it_ended(pid)
            raise
        super().__init__(pid, death)

    def _how_it_ended(self) -> int:
        return how_it_ended(self.pid, os.WNOWAIT)

    def _reap(self) -> int:
        return how_it_ended(self.pid)


class SpawnedChild(ForkedChild):
    """A child that runs the Python interpreter, with the complete environment and empty stdin.

    `output` receives stdout and stderr (None: this process's); `pass_fds` as for
    `subprocess.Popen`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: BinaryIO | None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._process = subprocess.Popen(
            bound([sys.executable, *command]),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        super().__init__(self._process.pid)

    def _reap(self) -> int:
        return self._process.wait()


class FdLoop:
    """Maps file descriptors to callbacks; `fd` is readable when a turn would make a call."""

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()
        self.fd = self._selector.fileno()

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        """Call `call` whenever `fd` is readable; replaces an earlier callback."""
        if fd in self._selector.get_map():
            self._selector.modify(fd, selectors.EVENT_READ, call)
        else:
            self._selector.register(fd, selectors.EVENT_READ, call)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`; call this before closing `fd`. Unknown descriptors are ignored."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def turn(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            # An earlier call of this turn may have closed the descriptor, or reused its number.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def close(self) -> None:
        self._selector.close()
