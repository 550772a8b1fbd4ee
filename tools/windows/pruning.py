# SPDX-License-Identifier: Apache-2.0
"""What may be deleted of the windows below a directory."""

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tools.windows.found import DISK, Found, complete


class Pruned(NamedTuple):
    """What goes, and the runs of which nothing does."""

    files: list[Path]
    live: list[str]
    """Runs with windows of processes that live."""

    @property
    def nbytes(self) -> int:
        """That are freed."""
        return sum(path.stat().st_blocks * 512 for path in self.files if path.exists())


def prunable(found: Sequence[Found], keep: int) -> Pruned:
    """Files of runs that have ended, besides the newest windows that are whole.

    Args:
        found: all windows below the directory.
        keep: windows of each run that stay, of those that all of its ranks have here; 0: nothing
            of an ended run stays.
    """
    live = live_runs(found)
    kept = {run: set(windows[:keep]) for run, windows in complete(found).items()}
    ended = [one for one in found if one.run not in live]
    files = {one.path for one in ended if _may_go(one, kept.get(one.run, set()), keep)}
    for one in ended:
        names = ('ledger', 'lock', 'upstream-log') if keep == 0 else ('upstream-log',)
        files |= {path for name in names if (path := _holder(one) / name).exists()}
    return Pruned(sorted(files), live)


def live_runs(found: Sequence[Found]) -> list[str]:
    """Runs with windows in the memory, or on the disk, of processes that live."""
    return sorted({one.run for one in found if _is_held(_holder(one))})


def remove(files: Sequence[Path], root: Path) -> None:
    """Delete files, and the directories below `root` that are empty then."""
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


def _may_go(one: Found, kept: set[str], keep: int) -> bool:
    if keep == 0 or one.state == 'free':
        return True
    if not kept:  # nothing is whole here: who knows what other nodes have
        return False
    if one.tier == DISK and one.state == 'being written':
        return False  # a job may be at it; its next life deletes what this one leaves
    return one.window not in kept or one.state != 'committed'


def _holder(one: Found) -> Path:
    """Directory of all that a rank keeps in memory, or on disk."""
    return one.path.parents[0 if one.tier == DISK else 1]


def _is_held(holder: Path) -> bool:
    """A live process has locked the directory of a rank (see `memory.holder_lock`).

    On a disk of several nodes that is known as far as its file system has locks that all see.
    """
    try:
        lock = os.open(holder / 'lock', os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there are no locks
        return False
    finally:
        os.close(lock)
    return False
