# SPDX-License-Identifier: Apache-2.0
"""Private captures of a recovery before its judgement.

With `--sparse-ckpt-verify stop` a recovery is refused if its state differs from earlier captures.
Until the verdict the captures of the recovery may be wrong. They are neither committed nor sent,
and no recovery starts from them or is compared with them. Their file names mark them as unjudged,
also for the next process (`memory/window/file_names.py`).
"""

import threading

from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.slot import SlotHeader


class Trial:
    """Windows of one recovery, from their first slot to the verdict. Any thread.

    Args:
        back_to: the window that the recovery starts from, which is trusted.
        until: iteration of the verdict, which precedes the capture of that iteration's state.
        of_all: all stages roll back together.
    """

    def __init__(self, back_to: WindowName, until: int, of_all: bool) -> None:
        self.back_to = back_to
        self.until = until
        self.of_all = of_all
        self._changed = threading.Condition()
        self._sealed: dict[WindowFile, list[SlotHeader]] = {}  # oldest first

    def is_over_before(self, start: int, length: int) -> bool:
        """True if a window that begins at `start` is complete before the verdict."""
        return start + length <= self.until

    def begins(self, file: WindowFile) -> None:
        with self._changed:
            self._sealed[file] = []

    def seal(self, file: WindowFile, header: SlotHeader) -> bool:
        """Keep a sealed slot private; False if its window began before the trial."""
        with self._changed:
            if file not in self._sealed:
                return False
            self._sealed[file].append(header)
            self._changed.notify_all()
            return True

    def forget(self, file: WindowFile) -> None:
        with self._changed:
            self._sealed.pop(file, None)

    def oldest(self, timeout_s: float) -> WindowFile | None:
        """Wait for a complete window; None after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._complete() is not None, timeout_s)
            return self._complete()

    def windows(self) -> list[tuple[WindowFile, list[SlotHeader]]]:
        with self._changed:
            return list(self._sealed.items())

    def _complete(self) -> WindowFile | None:
        for file, slots in self._sealed.items():
            if slots and slots[-1].slot == slots[-1].window - 1:
                return file
        return None
