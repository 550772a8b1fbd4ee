# SPDX-License-Identifier: Apache-2.0
"""A thread that watches devices for faults."""

import threading
from collections.abc import Callable

from moevement_ext.logger import logger_of
from moevement_ext.system.nvml import Finding, Nvml

logger = logger_of(__name__)

_READ_S = 2.0


class DeviceWatch:
    """Reads some devices every two seconds until closed, and reports each fault once.

    From `start` on, only the watching thread uses `source` and calls `found`.
    """

    def __init__(self, source: Nvml, found: Callable[[Finding], None]) -> None:
        self._source = source
        self._found = found
        self._told: set[Finding] = set()
        self._stopping = threading.Event()

    def look(self) -> None:
        """Report the faults that are new."""
        for finding in self._source.read():
            if finding not in self._told:
                self._told.add(finding)
                self._found(finding)

    def start(self) -> None:
        threading.Thread(target=self._run, name='device-watch', daemon=True).start()

    def close(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(_READ_S):
                self.look()
        except Exception:  # must not fail training (invariant I6)
            logger.exception('GPUs are no longer watched')
