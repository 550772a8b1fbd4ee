# SPDX-License-Identifier: Apache-2.0
"""Serves the coordinator in a child process, and starts another one when it dies or is stopped.

The keeper holds the listening socket, so clients find the next process where the last one was. A
new process knows nothing, and all clients state what they know again. The first one is started for
the first client: many programs have none.

The keeper belongs to a process that outlives the workers: the launcher, or under `moevement
torchrun` and torchrun's plug-in the agent of the first node. Otherwise the process of rank 0 keeps
the coordinator, and its successor another one.
"""

import asyncio
import ctypes
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from moevement_ext.config import COORDINATOR
from moevement_ext.coordinator.coordinator import Coordinator
from moevement_ext.logger import logger_of
from moevement_ext.replicate.connection import listen

logger = logger_of(__name__)

_PR_SET_PDEATHSIG = 1
# Pause before the next process.
_PAUSE_S = 0.2
_PACKAGES = Path(__file__).parents[2]
_ENDED = 'the coordinator (pid %d) ended with status %d; another one takes its place'

# A fork that inherits the other sides of the new process's pipes would keep it from its secret, and
# the keeper from its start: a data loader that begins, for example.
_no_forks = threading.Lock()
os.register_at_fork(
    before=_no_forks.acquire, after_in_parent=_no_forks.release, after_in_child=_no_forks.release
)


class Keeper:
    """Keeps a coordinator that begins and ends no rounds, until closed or this process ends.

    `host` is an address of this host, empty for all of them; `secret` is that of the clients (see
    `secret.of_coordinator`). Raises `OSError` if it cannot listen there.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self._listening = listen(host)
        self.address: tuple[str, int] = (host, self._listening.getsockname()[1])
        self._secret = secret
        self._closed = threading.Event()
        self._pid = 0
        # The kernel kills a child when the thread ends that has started it.
        self._thread = threading.Thread(target=self._run, name='sparse-ckpt-keeper', daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        while self._thread.is_alive():
            if pid := self._pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._thread.join(_PAUSE_S)
        self._listening.close()

    def _run(self) -> None:
        client = select.poll()
        client.register(self._listening, select.POLLIN)
        while not self._closed.is_set():
            if not client.poll(_PAUSE_S * 1000):
                continue
            try:
                self._serve()
            except OSError as error:  # must not fail training (invariant I6)
                logger.warning('no coordinator can be started, so no window persists: %s', error)
            self._closed.wait(_PAUSE_S)

    def _serve(self) -> None:
        """Start a process, and return once it is dead."""
        fd, path = self._listening.fileno(), os.environ.get('PYTHONPATH', '')
        with _no_forks:
            child = subprocess.Popen(
                [sys.executable, '-P', '-m', __name__, str(fd), str(os.getpid())],
                stdin=subprocess.PIPE,
                env={
                    **os.environ,
                    'PYTHONPATH': f'{_PACKAGES}{os.pathsep}{path}'.rstrip(os.pathsep),
                },
                pass_fds=[fd],
                start_new_session=True,
            )
            self._pid = child.pid
            assert child.stdin is not None
            with suppress(BrokenPipeError), child.stdin:  # it has died already
                child.stdin.write(self._secret)
        while os.WIFSTOPPED(status := os.waitpid(child.pid, os.WUNTRACED)[1]):
            child.kill()  # windows would count again only once it goes on
        self._pid, child.returncode = 0, os.waitstatus_to_exitcode(status)
        if not self._closed.is_set():
            logger.warning(_ENDED, child.pid, child.returncode)


def kept_by_launcher(host: str) -> tuple[str, int] | None:
    """Where the launcher keeps the coordinator; None if it keeps none.

    Called by rank 0, whose own address is `host`.
    """
    name, _, port = os.environ.get(COORDINATOR, '').rpartition(':')
    return (name or host, int(port)) if port else None


def main() -> None:
    """Serve on the inherited socket, as long as the keeper lives; its secret comes on stdin."""
    fd, keeper = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one for each rank
    listening = socket.socket(fileno=fd)
    secret = sys.stdin.buffer.read()
    asyncio.run(Coordinator(secret, lambda reports: b'', leads=False).serve(listening))


if __name__ == '__main__':
    main()
