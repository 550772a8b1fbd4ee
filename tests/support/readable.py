# SPDX-License-Identifier: Apache-2.0
"""Waiting for a descriptor, of whatever number: `select` refuses those from 1024 on."""

import os
import select


def readable(fd: int, within_s: float) -> bool:
    """There is something to read, or a process has ended; False if not within so many seconds."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def dies(pid: int) -> bool:
    """Wait for the death of any process. A zombie, which may never be reaped, counts as dead."""
    try:
        death = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    found = readable(death, 120.0)
    os.close(death)
    return found
