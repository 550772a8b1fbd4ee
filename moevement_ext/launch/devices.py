# SPDX-License-Identifier: Apache-2.0
"""Faults of a node's GPUs, which the agent reports to the supervisor."""

import contextlib
import os
import queue

from moevement_ext.launch.messages import DevicesFail
from moevement_ext.system.device_judging import Finding, Harm, Judge
from moevement_ext.system.device_watch import DeviceWatch
from moevement_ext.system.nvml import Nvml


class Devices:
    """Collects the findings of `source`; `fd` is readable when there are new ones."""

    def __init__(self, source: Nvml | None) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._source = source
        self._judge = Judge()
        self._found: queue.SimpleQueue[Finding] = queue.SimpleQueue()

    def look(self) -> None:
        """Take a first reading; call this before `watch`."""
        for reading in [] if self._source is None else self._source.read():
            for finding in self._judge.judge(reading):
                self._add(finding)

    def watch(self) -> None:
        if self._source is not None:
            DeviceWatch(self._source, self._judge, self._add)

    def take(self) -> list[DevicesFail]:
        """The findings since the last call; any thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        found = [self._found.get() for _ in range(self._found.qsize())]
        return [DevicesFail(f'GPU {one}', one.harm < Harm.DEVICE) for one in found]

    def _add(self, finding: Finding) -> None:
        if finding.harm >= Harm.WORN:
            self._found.put(finding)
            os.eventfd_write(self.fd, 1)
