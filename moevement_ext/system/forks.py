# SPDX-License-Identifier: Apache-2.0
"""Makes forked children, such as data loader workers, drop their parent's connections.

A connection ends only when the last process that holds it has ended. Loader workers notice the
death of their trainer seconds later; until then the trainer would appear alive to its peers.
Children also do not collect their parent's garbage. After a failure it contains old process groups,
whose destructors wait for threads that a fork does not have: the child would hang or crash.
"""

import gc
import os
import socket
import stat

_installed = False


def isolate_children() -> None:
    """Make later forks drop TCP sockets, not pipes, and keep garbage. Idempotent."""
    global _installed
    if not _installed:
        _installed = True
        os.register_at_fork(after_in_child=gc.freeze)
        os.register_at_fork(after_in_child=_drop_connections)


def _drop_connections() -> None:
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir('/proc/self/fd'):
        if _is_connection(int(name)):
            # The descriptor stays valid: its owner in this process may still close it.
            os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


def _is_connection(fd: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        with socket.socket(fileno=os.dup(fd)) as copy:
            return copy.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:  # the descriptor of the listing itself
        return False
