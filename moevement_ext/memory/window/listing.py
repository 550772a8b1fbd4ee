# SPDX-License-Identifier: Apache-2.0
"""What is in a directory of windows.

Only a listing that succeeds shows that a window is absent. Everything else is unknown: it is tried
again, then refused by name, and no file is deleted or renamed because of it.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from moevement_ext.logger import logger_of
from moevement_ext.memory.window.refused import UnreadableWindow

logger = logger_of(__name__)

TRIES = 3
"""Attempts per unresponsive replica holder, disk or directory."""
READ_AGAIN_S = 2.0
"""Pause before the next attempt: a disk may be slow, as all ranks read at once."""


def names_in(directory: Path) -> list[str]:
    """Sorted names in a directory, none if it does not exist; `UnreadableWindow` if unknown."""

    def names() -> list[str]:
        try:
            return sorted(os.listdir(directory))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise UnreadableWindow(f'{directory}: cannot be listed: {error.strerror}') from error

    return patiently(names)


def patiently[Seen](look: Callable[[], Seen], tries: int = TRIES) -> Seen:
    """The result of `look`, which is called again after an `UnreadableWindow`."""
    for _ in range(tries - 1):
        try:
            return look()
        except UnreadableWindow as refusal:
            logger.warning('read again: %s', refusal)
            time.sleep(READ_AGAIN_S)
    return look()
