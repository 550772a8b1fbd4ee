# SPDX-License-Identifier: Apache-2.0
"""What a rank captures in a recovery before that recovery is judged: nobody else knows of it.

With `--sparse-ckpt-verify stop` a recovery is refused if its state differs from what had been
captured. Until then what it captures on its way may be wrong, so it counts for nothing: it is
neither committed nor sent, neither recovered from nor compared with. Its files say so by their
names, also to the process after this one (`memory/window/file_names.py`).
"""

import threading

from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.slot import SlotHeader


class Trial:
    """Windows of one recovery, from their first slot to the verdict. Any thread.

    Args:
        back_to: the window that the recovery starts from, which does count.
        until: the iteration at which it is judged, before the state after that is captured.
        of_all: all stages go back together.
    """

    def __init__(self, back_to: WindowName, until: int, of_all: bool) -> None:
        self.back_to = back_to
        self.until = until
        self.of_all = of_all
        self._changed = threading.Condition()
        self._sealed: list[tuple[WindowFile, list[SlotHeader]]] = []

    def is_over_before(self, start: int, length: int) -> bool:
        """A window that begins at `start` is complete before the verdict."""
        return start + length <= self.until

    def begins(self, file: WindowFile) -> None:
        """A window is begun in `file`."""
        with self._changed:
            self._sealed.append((file, []))

    def seal(self, file: WindowFile, header: SlotHeader) -> bool:
        """Keep a sealed slot back; False if its window was begun before."""
        with self._changed:
            slots = self._slots(file)
            if slots is None:
                return False
            slots.append(header)
            self._changed.notify_all()
            return True

    def forget(self, file: WindowFile) -> None:
        """Its window is given up."""
        with self._changed:
            self._sealed = [item for item in self._sealed if item[0] is not file]

    def oldest(self, timeout_s: float) -> WindowFile | None:
        """A window that is complete, once it is; None if there is none in that time."""
        with self._changed:
            self._changed.wait_for(lambda: self._complete() is not None, timeout_s)
            return self._complete()

    def windows(self) -> list[tuple[WindowFile, list[SlotHeader]]]:
        """All of them, with the slots that are sealed, in the order in which they were begun."""
        with self._changed:
            return list(self._sealed)

    def _slots(self, file: WindowFile) -> list[SlotHeader] | None:
        return next((slots for other, slots in self._sealed if other is file), None)

    def _complete(self) -> WindowFile | None:
        for file, slots in self._sealed:
            if slots and slots[-1].slot == slots[-1].window - 1:
                return file
        return None
