# SPDX-License-Identifier: Apache-2.0
"""Event loop of one thread: calls functions when file descriptors become readable."""

import selectors
from collections.abc import Callable


class FdLoop:
    """Maps file descriptors to callbacks; `fd` is readable when a turn would make a call."""

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()
        self.fd = self._selector.fileno()

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        """Call `call` whenever `fd` is readable; replaces an earlier callback."""
        if fd in self._selector.get_map():
            self._selector.modify(fd, selectors.EVENT_READ, call)
        else:
            self._selector.register(fd, selectors.EVENT_READ, call)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`; call this before closing `fd`. Unknown descriptors are ignored."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def turn(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            # An earlier call of this turn may have closed the descriptor, or reused its number.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def close(self) -> None:
        self._selector.close()
