# SPDX-License-Identifier: Apache-2.0
"""Forked children, such as the workers of data loaders, let go of their parent's connections.

A connection ends only when the last process that has it is gone. Loader workers notice seconds
later that their trainer was killed; until then its peers would take it to be alive.

Nor do they collect their parent's garbage. After a failure process groups of the time before are
among it, and their destructors wait for threads that no fork has: the child would hang, or crash.
"""

import gc
import os
import socket
import stat

_installed = False


def isolate_children() -> None:
    """Have forks of this process, from now on, lose its TCP sockets and keep its garbage.

    Pipes and local sockets stay. Idempotent.
    """
    global _installed
    if not _installed:
        _installed = True
        os.register_at_fork(after_in_child=gc.freeze)
        os.register_at_fork(after_in_child=_drop_connections)


def _drop_connections() -> None:
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir('/proc/self/fd'):
        if _is_connection(int(name)):
            # The number stays in use: whoever owns it here may still close it some day.
            os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


def _is_connection(fd: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        with socket.socket(fileno=os.dup(fd)) as copy:
            return copy.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:  # it was the listing's own
        return False
