# SPDX-License-Identifier: Apache-2.0
"""What all ranks have agreed on about their windows: it decides which files may be overwritten."""

from collections.abc import Iterable

import msgspec

from moevement_ext.memory.window.name import Count, WindowName

MAX_GIVEN_UP = 8
"""Windows that may be skipped while one waits to be persisted; then that one is given up, too."""


class Agreed(msgspec.Struct, frozen=True, array_like=True):
    """The newest persisted window, and later ones that never will be.

    A window that one rank does not have is of no use to any, but nobody can tell that from a window
    that is late. So who gives one up, or skips it, says so.
    """

    persisted: WindowName | None = None
    """All ranks and the holders of their replicas have it."""
    given_up: tuple[Count, ...] = ()
    """Starts of windows that some rank does not have, ascending; `MAX_GIVEN_UP` of them stand for
    all before them, too."""

    def is_persisted(self, start: int) -> bool:
        """True of the newest persisted window, and of what is older."""
        return self.persisted is not None and start <= self.persisted.start

    def is_outdated(self, start: int) -> bool:
        """True if a newer window is persisted."""
        return self.persisted is not None and start < self.persisted.start

    def is_given_up(self, start: int) -> bool:
        """True if a window, though it is newer than the persisted one, will never be persisted."""
        if self.is_persisted(start):
            return False
        full = len(self.given_up) == MAX_GIVEN_UP
        return start in self.given_up or (full and start < self.given_up[0])

    def with_persisted(self, window: WindowName) -> 'Agreed':
        """What holds once `window` is persisted; nothing changes if a newer one is."""
        if self.is_persisted(window.start):
            return self
        return Agreed(window, self.given_up).with_given_up(())

    def with_given_up(self, starts: Iterable[int]) -> 'Agreed':
        """What holds once windows with these starts are given up, unless they are persisted."""
        later = {start for start in (*self.given_up, *starts) if not self.is_persisted(start)}
        return Agreed(self.persisted, tuple(sorted(later)[-MAX_GIVEN_UP:]))

    def joined(self, other: 'Agreed') -> 'Agreed':
        """What is known of the two; either may be out of date."""
        both = self if other.persisted is None else self.with_persisted(other.persisted)
        return both.with_given_up(other.given_up)

    def without_persisted_after(self, start: int) -> 'Agreed':
        """What is left of it once ranks have gone back to `start`."""
        if self.is_outdated(start):
            return Agreed(None, self.given_up)
        return self


NOTHING_AGREED = Agreed()
