# SPDX-License-Identifier: Apache-2.0
"""Windows below a directory that may be deleted."""

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from moevement_ext.memory.disk import complete_in
from moevement_ext.memory.shelf import base_of, directories_of

from .found import DISK, Found, complete


def prunable(found: Sequence[Found], live: Sequence[str], keep: int) -> list[Path]:
    """Files of finished runs, except their newest complete windows.

    Args:
        found: all windows below the directory.
        live: runs with windows of live processes, which stay untouched.
        keep: number of windows per run to keep, among those that all its ranks here have; 0: delete
            all windows of a finished run. Unless 0, all undamaged windows stay in memory, as ranks
            elsewhere may have the rest, and on disk also the window that all ranks had.
    """
    whole = complete(found)
    unread = {one.run for one in found if one.foreign and keep}  # a newer window may be complete
    ended = [one for one in found if one.run not in unread.union(live)]
    files = {one.path for one in ended if _may_go(one, whole[one.run], keep)}
    for one in ended:
        names = ('ledger', 'lock', 'upstream-log') if keep == 0 else ('upstream-log',)
        files |= {path for name in names if (path := _holder(one) / name).exists()}
    return sorted(files)


def live_runs(found: Sequence[Found]) -> list[str]:
    """Runs with windows of live processes, in memory or on disk, in all their layouts.

    An elastic job reads windows of its earlier layout until all its ranks have windows of their
    own, so it counts as live before it has any.
    """
    names = {(one.root, base_of(one.run)) for one in found}
    live = {
        (root, name)
        for root, name in names
        for run in directories_of(root, name)
        for lock in (root / run).glob('**/lock')
        if _is_held(lock.parent)
    }
    return sorted({one.run for one in found if (one.root, base_of(one.run)) in live})


def remove(files: Sequence[Path], root: Path) -> None:
    """Delete files, and directories below `root` that become empty."""
    for path in files:
        path.unlink(missing_ok=True)
    for path in files:
        for parent in path.parents:
            if root.resolve() not in parent.parents:
                break
            with suppress(FileNotFoundError):
                if any(parent.iterdir()):
                    break
                parent.rmdir()


def _may_go(one: Found, whole: Sequence[str], keep: int) -> bool:
    if keep == 0 or one.state == 'free':
        return True
    if not whole:  # no window is complete here, but other nodes may have the rest
        return False
    if one.tier == DISK and one.state == 'being written':
        return False  # a job may use the file; its next attempt deletes leftovers
    if one.tier != DISK:
        return not one.sound
    if one.window not in whole or one.state != 'committed':
        return True
    return one.window not in whole[:keep] and one.start != complete_in(one.path.parent)


def _holder(one: Found) -> Path:
    """Directory of all files that a rank keeps in memory, or on disk."""
    return one.path.parents[0 if one.tier == DISK else 1]


def _is_held(holder: Path) -> bool:
    """True if a live process has locked the directory of a rank (see `memory.holder_lock`).

    On a shared disk, the result is as reliable as the file system's locks between nodes. A lock
    that this user cannot open raises `OSError`, unlike in `holder_lock.is_held`: it may be held.
    """
    try:
        lock = os.open(holder / 'lock', os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks
        return False
    finally:
        os.close(lock)
    return False
