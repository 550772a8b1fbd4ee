# SPDX-License-Identifier: Apache-2.0
"""A thread that watches devices for faults."""

import logging
import threading
from collections.abc import Callable

from moevement_ext.system.device_judging import Finding
from moevement_ext.system.nvml import Nvml

logger = logging.getLogger(__name__)

_WAIT_S = 1.0
_LOOKS_BETWEEN_READINGS = 5


class DeviceWatch:
    """Reports new faults of some devices, until closed.

    Error reports of the driver are passed on at once; all other values are read every five
    seconds and after each error report. A lasting fault is reported once. From `start` on,
    only the watching thread uses `source` and calls `found`.
    """

    def __init__(self, source: Nvml, found: Callable[[Finding], None]) -> None:
        self._source = source
        self._found = found
        self._told: set[Finding] = set()
        self._stopping = threading.Event()

    def look(self) -> None:
        """Report the lasting faults that are new."""
        for finding in self._source.read():
            if finding not in self._told:
                self._told.add(finding)
                self._found(finding)

    def start(self) -> None:
        threading.Thread(target=self._run, name='device-watch', daemon=True).start()

    def close(self) -> None:
        """Stop watching; the thread ends within about a second."""
        self._stopping.set()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                for _ in range(_LOOKS_BETWEEN_READINGS):
                    if self._stopping.is_set() or self._hear():
                        break
                self.look()
        except Exception:  # must not fail training (invariant I6)
            logger.exception('GPUs are no longer watched')

    def _hear(self) -> bool:
        """Wait for an error report; True if there was one."""
        found = self._source.wait(_WAIT_S)
        for finding in found or ():
            self._found(finding)
        return found is not None
