# SPDX-License-Identifier: Apache-2.0
"""The ranks' agreement about their windows, which decides which files may be overwritten."""

from collections.abc import Iterable

import msgspec

from moevement_ext.memory.window.name import Count, WindowName

MAX_GIVEN_UP = 8
"""Windows that may be skipped while another waits for persistence; then that one is given up,
too."""


class Agreed(msgspec.Struct, frozen=True, array_like=True):
    """The newest persisted window, and later windows that will never be persisted.

    A window that one rank lacks is useless to all ranks, but looks to them like a late window.
    So a rank that gives up or skips a window reports it.
    """

    persisted: WindowName | None = None
    """Window that all ranks and the holders of their replicas have."""
    given_up: tuple[Count, ...] = ()
    """Starts of windows that some rank lacks, ascending; a full list of `MAX_GIVEN_UP` starts
    includes all earlier windows."""

    def is_persisted(self, start: int) -> bool:
        """True for the newest persisted window and older windows."""
        return self.persisted is not None and start <= self.persisted.start

    def is_outdated(self, window: WindowName) -> bool:
        """True for windows before the newest persisted one, and for those of its start."""
        return self.is_persisted(window.start) and window != self.persisted

    def is_given_up(self, start: int) -> bool:
        if self.is_persisted(start):
            return False
        full = len(self.given_up) == MAX_GIVEN_UP
        return start in self.given_up or (full and start < self.given_up[0])

    def with_persisted(self, window: WindowName) -> 'Agreed':
        """The agreement once `window` is persisted; unchanged if a newer window is."""
        if self.is_persisted(window.start):
            return self
        return Agreed(window, self.given_up).with_given_up(())

    def with_given_up(self, starts: Iterable[int]) -> 'Agreed':
        """The agreement once windows with these starts are given up; skips persisted ones."""
        later = {start for start in (*self.given_up, *starts) if not self.is_persisted(start)}
        return Agreed(self.persisted, tuple(sorted(later)[-MAX_GIVEN_UP:]))

    def joined(self, other: 'Agreed') -> 'Agreed':
        """Merge two agreements, either of which may be outdated."""
        both = self if other.persisted is None else self.with_persisted(other.persisted)
        return both.with_given_up(other.given_up)

    def without_persisted_after(self, start: int) -> 'Agreed':
        """The agreement after a rollback to `start`."""
        if self.persisted is not None and self.persisted.start > start:
            return Agreed(None, self.given_up)
        return self


NOTHING_AGREED = Agreed()
