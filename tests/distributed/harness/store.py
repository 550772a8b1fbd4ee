# SPDX-License-Identifier: Apache-2.0
"""A store of `--sparse-ckpt-store` as the process that serves it for a job."""

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
        address: HOST:PORT, the same in all attempts.
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
        """Of the process that starts another one when that which serves dies."""
        return self._process.pid

    def lose(self) -> None:
        """SIGKILL what serves; returns when another process does, which knows nothing."""
        os.kill(self._server, signal.SIGKILL)
        self._wait()

    def hang_up(self) -> None:
        """Read nothing any more of what it says."""
        assert self._process.stdout is not None
        self._process.stdout.close()

    def close(self) -> int:
        """End it as a person does; returns its exit status."""
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
