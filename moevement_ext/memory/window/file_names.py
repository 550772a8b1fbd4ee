# SPDX-License-Identifier: Apache-2.0
"""Names of window files, one for each generation of an owner.

    free-<k>.window                nothing of value
    writing-<start>-<plan>.window  being filled, worthless until committed
    window-<start>-<plan>.window   committed: whole and immutable (invariant I3)

Commit is a rename; a file gets another name *before* its first byte is overwritten. So the name
alone shows a restarted process, or any reader, whether a file can be trusted.
"""

import re
from pathlib import Path

from moevement_ext.memory.window.listing import names_in
from moevement_ext.memory.window.name import StoredWindow, WindowName

COMMITTED = 'window-*.window'
"""Pattern of the names of committed windows."""

_PLAN = re.compile(r'[A-Za-z0-9_]{1,100}')
_COMMITTED = re.compile(r'window-(\d{1,18})-([A-Za-z0-9_]{1,100})\.window')


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
