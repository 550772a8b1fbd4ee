# SPDX-License-Identifier: Apache-2.0
"""One window file of an owner, and its state."""

import enum
import logging
from typing import NamedTuple

from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.refused import RefusedWindow, TruncatedWindow
from moevement_ext.memory.window.slot import SlotHeader

logger = logging.getLogger(__name__)


class FileState(enum.Enum):
    """State of a file."""

    FREE = 'free'
    WRITING = 'writing'
    UNJUDGED = 'unjudged'
    COMMITTED = 'committed'
    CUT_OFF = 'cut off'
    """Left incomplete by an earlier process: free, and compared with until it is reused."""


BEING_FILLED = FileState.WRITING, FileState.UNJUDGED


class FileSize(NamedTuple):
    """Bytes of a window file."""

    capacity: int
    """Size of the longest possible window."""
    room: int
    """Bytes with pages: the size of the longest window in force."""


class Generation:
    """One file and its state; `index` names the file while it is free.

    While `fetched`, a thread fills it that no other one waits for, whatever becomes of its window.
    """

    def __init__(self, file: WindowFile, index: int, state: FileState) -> None:
        self.file = file
        self.index = index
        self.state = state
        self.held = False
        self.fetched = False

    @property
    def start(self) -> int:
        name = self.file.name
        return -1 if name is None else name.start


def readable_headers(file: WindowFile) -> list[SlotHeader]:
    """Headers of sealed slots; none if they are damaged."""
    try:
        return file.headers()
    except RefusedWindow as refusal:
        logger.warning('not used for verification: %s', refusal)
        return []


def require_complete(file: WindowFile) -> None:
    """Refuse to commit a file without all slots, with a `TruncatedWindow`."""
    slots = file.slots()
    if not slots or slots != list(range(file.length())):
        raise TruncatedWindow(f'{file.path}: cannot be committed with only slots {slots}')
