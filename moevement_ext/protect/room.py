# SPDX-License-Identifier: Apache-2.0
"""Keeps as much host memory reserved as the windows in force need, within the memory plan."""

from collections.abc import Callable

from moevement_ext.errors import HostMemoryError
from moevement_ext.replicate.host_memory import HostMemory


class WindowRoom:
    """Room for windows of the length in force, and of the one that comes next.

    Args:
        memory: host memory of this rank.
        on_degraded: called with a reason when there is no room.

    Attributes:
        in_force: W of the window that is captured now. Set by the training thread.
        limit: the longest W that there was room for, once there was none for a longer one.
    """

    def __init__(self, memory: HostMemory, on_degraded: Callable[[str], None]) -> None:
        self._memory = memory
        self._on_degraded = on_degraded
        self._next = self.in_force = memory.window
        self.limit: int | None = None

    def before(self, window: int) -> None:
        """Make room before windows of this length come into force. Any thread but training's.

        Without room they are given up, until all ranks have a plan with windows for which each has
        room.
        """
        self._next = window
        self.in_log(window)
        if window <= self._memory.window:
            return
        try:
            self._memory.make_room_for(window)
        except (HostMemoryError, OSError) as error:
            self.limit = self._memory.window
            self._on_degraded(f'there is no room for windows of {window}: {error}')

    def in_log(self, window: int) -> None:
        """Enlarge the log; on failure localized recovery is impossible for a while. Any thread."""
        try:
            self._memory.make_room_in_log(window)
        except (HostMemoryError, OSError) as error:
            self._on_degraded(f'the log has no room for windows of {window}: {error}')

    def settle(self) -> None:
        """Give back what only longer windows needed. Tracker's thread, when one is persisted."""
        window = max(self.in_force, self._next)
        if window < self._memory.window:
            self._memory.make_room_for(window)
