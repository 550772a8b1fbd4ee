# SPDX-License-Identifier: Apache-2.0
"""Keeps as much host memory reserved as the windows in force need, within the memory plan."""

import threading
from collections.abc import Callable

from moevement_ext.errors import HostMemoryError
from moevement_ext.replicate.host_memory import HostMemory


class WindowRoom:
    """Room for windows of the current length (`in_force`), and of the next one.

    `limit` is the longest W with enough room, set once a longer one had too little.
    `on_degraded` is called with a reason when there is no room.
    """

    def __init__(self, memory: HostMemory, on_degraded: Callable[[str], None]) -> None:
        self._memory = memory
        self._on_degraded = on_degraded
        self._next = self.in_force = memory.window
        self.limit: int | None = None
        # Windows that start at or before this iteration may be longer, or still in use by a
        # recovery.
        self._unlike = -1
        self._log = threading.Lock()
        self._settling = threading.Lock()

    def begins(self, start: int, window: int) -> None:
        """Note that a window begins with the state after iteration `start`. Training thread."""
        if window != self.in_force:
            self._unlike = start - 1
        self.in_force = window

    def before(self, window: int) -> None:
        """Make room before windows of this length come into force. May take seconds.

        Any thread; the training thread only at the start, before the first iteration.

        Without room, such windows are given up until all ranks have a plan with shorter
        windows, for which every rank has room.
        """
        with self._settling:  # `settle` frees memory that only longer windows need
            self._next = window
        self.in_log(window)
        if window <= self._memory.window:
            return
        try:
            self._memory.make_room_for(window)
        except (HostMemoryError, OSError) as error:
            self.limit = self._memory.window
            self._on_degraded(f'there is no room for windows of {window}: {error}')

    def for_recovery(self, start: int, until: int) -> None:
        """Make room in the log for a recovery from window `start` to `until`. Training thread."""
        with self._log:
            self._unlike = max(self._unlike, start)
        self.in_log(until - start + 1)

    def in_log(self, window: int) -> None:
        """Enlarge the log; on failure localized recovery is impossible for a while. Any thread."""
        with self._log:
            try:
                self._memory.make_room_in_log(window)
            except (HostMemoryError, OSError) as error:
                self._on_degraded(f'the log has no room for windows of {window}: {error}')

    def settle(self, start: int) -> None:
        """Free memory that only longer windows needed. Tracker's thread.

        The log holds the iterations after the newly persisted window, which starts at
        `start`, so that window must be as short as the next ones.
        """
        with self._settling:
            window = max(self.in_force, self._next)
            if window < self._memory.window:
                self._memory.make_room_for(window)
        with self._log:
            if start > self._unlike:
                self._memory.give_back_log(max(self.in_force, self._next))
