# SPDX-License-Identifier: Apache-2.0
"""One process of the job, worker or spare, with all that it starts itself."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

_BOUND = Path(__file__).with_name('bound.py')


class Child:
    """A Python process in a session of its own (Ctrl-C does not reach it), bound to this one.

    It is killed when the *thread* that started it ends: so Linux has it. What it starts itself is
    not, but belongs to its process group.

    Args:
        command: arguments of the Python interpreter.
        environment: all of it.
        stdin, stdout, stderr: as for `subprocess.Popen`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | BinaryIO,
        stderr: int | BinaryIO | None,
    ) -> None:
        isolated = [sys.executable, '-I', '-S', str(_BOUND), str(os.getpid())]
        self._process = subprocess.Popen(
            [*isolated, sys.executable, *command],
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.death = os.pidfd_open(self.pid)
        """Becomes readable when the process is dead."""

    @property
    def output(self) -> int | None:
        """Read end of its stdout, if that is a pipe."""
        return None if self._process.stdout is None else self._process.stdout.fileno()

    @property
    def ended(self) -> bool:
        """True once `reap` was called."""
        return self._process.returncode is not None

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

    def signal(self, number: int) -> None:
        """Send a signal to the process and what it started; to nobody once it was reaped."""
        if not self.ended:  # until then the number is its own
            os.killpg(self.pid, number)

    def wait(self) -> bool:
        """Wait until it is dead; True if it ended with exit status 0."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return found is not None and (found.si_code, found.si_status) == (os.CLD_EXITED, 0)

    def reap(self) -> int:
        """Wait until it is dead, kill what it left behind unless it ended well, and let it go.

        Returns:
            Exit status, or the negative number of the signal that killed it.
        """
        if not self.wait():
            self.signal(signal.SIGKILL)
        code = self._process.wait()
        os.close(self.death)
        return code

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
