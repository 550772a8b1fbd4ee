# SPDX-License-Identifier: Apache-2.0
"""Names of window files, one for each generation of an owner:

    free-<k>.window                nothing of value
    writing-<start>-<plan>.window  being filled, worthless until committed
    window-<start>-<plan>.window   committed: whole and immutable (invariant I3)

Commit is a rename; a file gets another name *before* its first byte is overwritten. So the names
alone tell a restarted process, or any reader, what can be trusted.
"""

import os
import re
from pathlib import Path

from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import WindowRef

_PLAN = re.compile(r'[A-Za-z0-9_]{1,100}')


_COMMITTED = re.compile(r'window-(\d{1,18})-([A-Za-z0-9_]{1,100})\.window')


def check_plan(plan: str) -> None:
    """Raise ValueError if a plan's digest cannot be part of a file name."""
    if not _PLAN.fullmatch(plan):
        raise ValueError(f'plan digest {plan!r} must be letters, digits and "_" (file name)')


def committed_name(file: WindowFile) -> str:
    """Name of a file once the window in it is committed."""
    if file.name is None:
        raise ValueError(f'{file.path} holds no window')
    return f'window-{file.name.start}-{file.name.plan}.window'


def committed_in(path: Path) -> list[WindowRef]:
    """Committed windows in the directory of an owner; none if it cannot be read."""
    try:
        names = os.listdir(path)
    except OSError:
        return []
    matches = [match for match in map(_COMMITTED.fullmatch, names) if match]
    return [WindowRef(int(match[1]), match[2], path / match[0]) for match in matches]
