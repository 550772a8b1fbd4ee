# SPDX-License-Identifier: Apache-2.0
"""Waiting for a descriptor, of whatever number: `select` refuses those from 1024 on."""

import select


def readable(fd: int, within_s: float) -> bool:
    """There is something to read, or a process has ended; False if not within so many seconds."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
