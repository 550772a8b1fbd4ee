# SPDX-License-Identifier: Apache-2.0
"""What a process sets for itself: quick DNS lookups, children without connections, near CPUs."""

import gc
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from moevement_ext.logger import logger_of

logger = logger_of(__name__)

_VARIABLE = 'RES_OPTIONS'
# See resolv.conf(5). A dead server costs 5 s in total; by default 10 s.
_SOON = 'timeout:1 attempts:5'
_DEVICES = Path('/sys/bus/pci/devices')
_installed = False


def ask_again_soon() -> None:
    """Make this process retry a lookup after one second. Call this before the first lookup.

    torch's store resolves the name of each address that it connects to, for its log; a recovery
    makes dozens of connections over all ranks. One lost datagram to a name server would cost 5 s,
    the default timeout of the resolver, in a worker or in the launcher, which serves the store.
    Options in the environment stay as they are.
    """
    os.environ.setdefault(_VARIABLE, _SOON)


def isolate_children() -> None:
    """Make later forks drop TCP sockets, not pipes, and keep garbage. Idempotent.

    A connection ends only when the last process that holds it has ended. Loader workers notice the
    death of their trainer seconds later; until then the trainer would appear alive to its peers.
    After a failure the garbage contains old process groups, whose destructors wait for threads that
    a fork does not have: a child that collected it would hang or crash.
    """
    global _installed
    if not _installed:
        _installed = True
        os.register_at_fork(after_in_child=gc.freeze)
        os.register_at_fork(after_in_child=_drop_connections)


def _drop_connections() -> None:
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd, _ in connections():
        # The descriptor stays valid: its owner in this process may still close it.
        os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def connections() -> Iterator[tuple[int, socket.socket]]:
    """TCP sockets of this process: each descriptor, with a duplicate for the time of the turn."""
    for fd in map(int, os.listdir('/proc/self/fd')):
        with suppress(OSError):  # the descriptor of the listing itself, or closed meanwhile
            # Of a file, closing a duplicate would drop all locks of this process.
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        yield fd, copy


def bind(address: str, devices: Path = _DEVICES) -> set[int] | None:
    """Bind the calling thread, and threads and processes that it starts later, near a device.

    The kernel places a window's pages near the CPU that touches them first, and a copy from a GPU
    of the other socket loses a third to a half of the bandwidth. Memory needs no binding: the
    kernel allocates it where the process runs.

    Returns the CPUs; or None, without a change, if the kernel reports no CPUs, as in many virtual
    machines, or the process may use none of them, or only them. A launcher's own binding then
    remains. `address` is a PCI address, such as `0000:1b:00.0`; `devices` the kernel's directory.
    """
    try:
        near = cpus_in((devices / address / 'local_cpulist').read_text('ascii'))
    except (OSError, ValueError) as error:
        logger.info('the CPUs near GPU %s are not known: %s', address, error)
        return None
    allowed = os.sched_getaffinity(0)
    chosen = near & allowed
    if not chosen or chosen == allowed:
        return None
    os.sched_setaffinity(0, chosen)
    return chosen


def cpus_in(listed: str) -> set[int]:
    """Parse a CPU list of the kernel, such as `0-3,8`; `ValueError` for other text."""
    found: set[int] = set()
    for part in filter(None, listed.strip().split(',')):
        first, _, last = part.partition('-')
        found.update(range(int(first), int(last or first) + 1))
    return found
