# SPDX-License-Identifier: Apache-2.0
"""The store of `--sparse-ckpt-store`, as a process that serves one job."""

import os
import re
import signal
import subprocess
import sys

from tests.distributed.harness.cluster import ROOT

_SERVES = re.compile(r'\[store\] process (\d+) serves at (127\.0\.0\.1:\d+);')


class OutsideStore:
    """Serves on loopback until it is closed.

    Attributes:
        address: HOST:PORT, the same after each restart of the server.
    """

    def __init__(self) -> None:
        command = [
            sys.executable,
            '-m',
            'moevement_ext.store',
            '--host',
            '127.0.0.1',
            '--port',
            '0',
        ]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self._wait()

    @property
    def pid(self) -> int:
        """Process that starts a new server when the serving process dies."""
        return self._process.pid

    def lose(self) -> None:
        """SIGKILL the server; return when its successor serves, which has an empty store."""
        os.kill(self._server, signal.SIGKILL)
        self._wait()

    def hang_up(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()

    def close(self) -> int:
        """Terminate it as a user would; return its exit status."""
        self._process.terminate()
        code = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def _wait(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = _SERVES.match(line)
            if found:
                self._server, self.address = int(found[1]), found[2]
                return
        raise AssertionError('the store ended')
