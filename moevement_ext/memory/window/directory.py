# SPDX-License-Identifier: Apache-2.0
"""Directories of windows: the names of the files, one for each generation of an owner.

    free-<k>.window                nothing of value
    writing-<start>-<plan>.window  being filled, worthless until committed
    window-<start>-<plan>.window   committed: whole and immutable (invariant I3)

Commit is a rename; a file gets another name *before* its first byte is overwritten. So the name
alone shows a restarted process, or any reader, whether a file can be trusted.

Only a listing that succeeds shows that a window is absent. Everything else is unknown: it is tried
again, then refused by name, and no file is deleted or renamed because of it.
"""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from moevement_ext.logger import logger_of
from moevement_ext.memory.window.name import StoredWindow, WindowName
from moevement_ext.memory.window.refusal import UnreadableWindow

logger = logger_of(__name__)

TRIES = 3
"""Attempts per unresponsive replica holder, disk or directory."""
READ_AGAIN_S = 2.0
"""Pause before the next attempt: a disk may be slow, as all ranks read at once."""

COMMITTED = 'window-*.window'
"""Pattern of the names of committed windows."""
_PLAN = re.compile(r'[A-Za-z0-9_]{1,100}')
_COMMITTED = re.compile(r'window-(\d{1,18})-([A-Za-z0-9_]{1,100})\.window')


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


def free_name(index: int) -> str:
    return f'free-{index}.window'


def writing_name(name: WindowName) -> str:
    """Name of the file of a window being written; `ValueError` if the plan cannot be in it."""
    if not _PLAN.fullmatch(name.plan):
        raise ValueError(f'plan digest {name.plan!r} must be letters, digits and "_" (file name)')
    return f'writing-{name}.window'


def committed_name(name: WindowName) -> str:
    return f'window-{name}.window'


def committed_in(directory: Path, holder: int, owner: int) -> list[StoredWindow]:
    """List the committed windows in the directory of an owner; errors as of `names_in`."""
    matches = [match for match in map(_COMMITTED.fullmatch, names_in(directory)) if match]
    return [
        StoredWindow(holder, owner, WindowName(int(match[1]), match[2]), directory / match[0])
        for match in matches
    ]
