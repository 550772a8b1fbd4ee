# SPDX-License-Identifier: Apache-2.0
"""Thread that watches devices."""

import logging
import threading
from collections.abc import Callable

from moevement_ext.system.device_judging import Finding, Judge
from moevement_ext.system.nvml import Nvml

logger = logging.getLogger(__name__)

_WAIT_S = 1.0
_LOOKS_BETWEEN_READINGS = 5


class DeviceWatch:
    """Reports new faults of some devices, until closed.

    Error reports of the driver are passed on at once; all other values are read every five
    seconds and after each error report. Only the watching thread uses `source` and calls
    `found`.
    """

    def __init__(self, source: Nvml, judge: Judge, found: Callable[[Finding], None]) -> None:
        self._source = source
        self._judge = judge
        self._found = found
        self._stopping = threading.Event()
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
                for reading in self._source.read():
                    self._tell(self._judge.judge(reading))
        except Exception:  # must not fail training (invariant I6)
            logger.exception('GPUs are no longer watched')

    def _hear(self) -> bool:
        """Wait for an error report; True if there was one."""
        reading = self._source.wait(_WAIT_S)
        if reading is not None:
            self._tell(self._judge.judge(reading))
        return reading is not None

    def _tell(self, findings: list[Finding]) -> None:
        for finding in findings:
            self._found(finding)
