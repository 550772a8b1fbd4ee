# SPDX-License-Identifier: Apache-2.0
"""Makes training wait for its disk, for deterministic contents; reads without checks, or fails."""

import errno
import os
import time

from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.window import file
from moevement_ext.protect.checkpointer import SparseCheckpointer

_DEADLINE_S = 120.0


def training_waits_for_the_disk() -> None:
    """Iteration 6 begins when some window is on all disks, iteration 9 when window 6 is."""
    begin = SparseCheckpointer.begin

    def waiting(self, iteration, *given):
        wanted = {5: 0, 8: 6}.get(iteration, -1)
        deadline = time.monotonic() + _DEADLINE_S
        while _newest(self) < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f'window {wanted} is not on all disks')
            time.sleep(0.01)
        begin(self, iteration, *given)

    SparseCheckpointer.begin = waiting


def _newest(checkpointer: SparseCheckpointer) -> int:
    on_disk = checkpointer.statistics.on_disk
    return -1 if on_disk is None else on_disk


def directory_is_not_listed() -> None:
    """Windows of rank 3 on disk cannot be listed: its file server does not answer now."""
    really = os.listdir

    def listed(path='.'):
        if str(path).endswith('/rank3'):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return really(path)

    os.listdir = listed


def window_from_disk_not_verified() -> None:
    """What the disk returns is taken as it is."""
    read = DiskWindows.read

    def unverified(self, name, into, received):
        fill_verified = file._fill
        file._fill = lambda payload, records, fill: fill_verified(payload, [], fill)
        try:
            read(self, name, into, received)
        finally:
            file._fill = fill_verified

    DiskWindows.read = unverified
