# SPDX-License-Identifier: Apache-2.0
"""Names of windows, their parts, ranks and files, and what ranks agree on about their windows.

A directory of windows has one file for each generation of an owner:

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
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from moevement_ext.logger import logger_of
from moevement_ext.memory.window.refusal import UnreadableWindow
from moevement_ext.memory.window.settings import Placed, RunSettings

logger = logger_of(__name__)

Count = Annotated[int, msgspec.Meta(ge=0)]
"""A non-negative integer; decoders of files and messages check this."""

MAX_GIVEN_UP = 8
"""Windows that may be skipped while another waits for persistence; then that one is given up,
too."""


@dataclass(frozen=True)
class RankIdentity:
    """Run, layout and rank: stored in every slot, and compared before a slot is loaded."""

    run: str
    """Digest of the run: model, data, hyperparameters."""
    topology: str
    """Digest of the parallel layout."""
    rank: int
    """Global rank, which owns the windows that it captures."""
    settings: RunSettings = field(default=RunSettings(), compare=False)
    """The digested settings and more, as `bounded` returns them."""
    placed: Placed | None = field(default=None, compare=False)
    """Layout and place of the rank; None if the trainer has no numbers for them."""


class WindowName(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Start, history and plan of a window, which distinguish the windows of one owner."""

    start: Count
    plan: str
    """Name of the history, "_", and the digest of the plan (which operators in which slot)."""

    def __str__(self) -> str:
        return f'{self.start}-{self.plan}'

    @property
    def history(self) -> str:
        return self.plan.rpartition('_')[0]


class History(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Iterations computed one after the other, of which parts of a window may be joined.

    Each start of the job begins a history, and so does each recovery in which all stages go back:
    without deterministic kernels the iterations that are computed again have other bits.
    """

    name: str = ''
    """Seconds and a random number; a later history has the greater name."""
    base: WindowName | None = None
    """Window of an earlier history that this one goes on from."""

    def window(self, start: int, digest: str) -> WindowName:
        return WindowName(start, f'{self.name}_{digest}'.lstrip('_'))

    def includes(self, window: WindowName) -> bool:
        """True if the state in this window led to the present one."""
        base = self.base
        before = base is not None and window.history == base.history and window.start <= base.start
        return before or window.history == self.name

    def after(self, base: WindowName) -> 'History':
        """The history in which all ranks go back to `base`; each derives the same."""
        seconds = int(self.name[:8] or '0', 16) + 1
        random = xxhash.xxh32_hexdigest(f'{self.name} {base}'.encode())
        return History(f'{seconds:08x}{random}', base)


def drawn_history() -> str:
    return f'{int(time.time()):08x}{secrets.token_hex(4)}'


class Window(msgspec.Struct, frozen=True, order=True, gc=False):
    """A window, independent of the rank: name and length are the same on all ranks."""

    name: WindowName
    length: int
    """W, iterations (and slots) in the window."""

    @property
    def start(self) -> int:
        """Iteration whose state its first slot holds."""
        return self.name.start

    @property
    def dense_at(self) -> int:
        """Iteration at which the conversion ends: every operator is active and consistent."""
        return self.start + self.length - 1


class HeldWindow(msgspec.Struct, frozen=True, order=True, gc=False):
    """One owner's part of a window, committed on some node."""

    window: Window
    owner: int


class StoredWindow(NamedTuple):
    """One owner's part of a window, committed in a file on this node."""

    holder: int
    """Rank that keeps the file: the owner, or a peer for its replica."""
    owner: int
    name: WindowName
    path: Path


class Agreed(msgspec.Struct, frozen=True, array_like=True):
    """The newest persisted window, and later windows that will never be persisted.

    A window that one rank lacks is useless to all ranks, but looks to them like a late window.
    So a rank that gives up or skips a window reports it.
    """

    persisted: WindowName | None = None
    """Window that all ranks and the holders of their replicas have."""
    given_up: tuple[Count, ...] = ()
    """Starts of windows that some rank lacks, ascending; a full list of `MAX_GIVEN_UP` starts
    includes all earlier windows."""

    def is_persisted(self, start: int) -> bool:
        """True for the newest persisted window and older windows."""
        return self.persisted is not None and start <= self.persisted.start

    def is_outdated(self, window: WindowName) -> bool:
        """True for windows before the newest persisted one, and for those of its start."""
        return self.is_persisted(window.start) and window != self.persisted

    def is_given_up(self, start: int) -> bool:
        if self.is_persisted(start):
            return False
        full = len(self.given_up) == MAX_GIVEN_UP
        return start in self.given_up or (full and start < self.given_up[0])

    def with_persisted(self, window: WindowName) -> 'Agreed':
        """The agreement once `window` is persisted; unchanged if a newer window is."""
        if self.is_persisted(window.start):
            return self
        return Agreed(window, self.given_up).with_given_up(())

    def with_given_up(self, starts: Iterable[int]) -> 'Agreed':
        """The agreement once windows with these starts are given up; skips persisted ones."""
        later = {start for start in (*self.given_up, *starts) if not self.is_persisted(start)}
        return Agreed(self.persisted, tuple(sorted(later)[-MAX_GIVEN_UP:]))

    def then(self, later: 'Agreed') -> 'Agreed':
        """The agreement after a later one, which does not take back what is persisted.

        Lists of given up windows are not merged: a merged one could be full, though a window before
        it may still be persisted.
        """
        return later if self.persisted is None else later.with_persisted(self.persisted)

    def without_persisted_after(self, start: int) -> 'Agreed':
        """The agreement after a rollback to `start`."""
        if self.persisted is not None and self.persisted.start > start:
            return Agreed(None, self.given_up)
        return self


NOTHING_AGREED = Agreed()


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
            raise UnreadableWindow(f'cannot be listed: {error.strerror}', directory) from error

    return patiently(names)


def patiently[Seen](read: Callable[[], Seen], tries: int = TRIES) -> Seen:
    """The result of `read`, which is called again after an `UnreadableWindow`."""
    for _ in range(tries - 1):
        try:
            return read()
        except UnreadableWindow as refusal:
            logger.warning('read again: %s', refusal)
            time.sleep(READ_AGAIN_S)
    return read()


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
