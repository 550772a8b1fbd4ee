# SPDX-License-Identifier: Apache-2.0
"""Calls functions when file descriptors have something to read; all on one thread."""

import selectors
from collections.abc import Callable


class FdLoop:
    """File descriptors and who is called when they become readable.

    Attributes:
        fd: readable when a turn would make a call.
    """

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()
        self.fd = self._selector.fileno()

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        """Call `call` whenever `fd` is readable, instead of what was called before."""
        if fd in self._selector.get_map():
            self._selector.modify(fd, selectors.EVENT_READ, call)
        else:
            self._selector.register(fd, selectors.EVENT_READ, call)

    def forget(self, fd: int) -> None:
        """Watch `fd` no more; before it is closed. Nothing happens if it is not watched."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def turn(self, timeout_s: float) -> None:
        """Wait until something is readable, `timeout_s` at most, and make the calls."""
        for key, _ in self._selector.select(timeout_s):
            # An earlier call of this turn may have closed it, or given its number to another.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def close(self) -> None:
        """Forget everything."""
        self._selector.close()
