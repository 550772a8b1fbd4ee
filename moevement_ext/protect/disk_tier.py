# SPDX-License-Identifier: Apache-2.0
"""Copies persisted windows to disk, at a bounded rate, on a thread of its own.

    offered -> held -> copied and verified -> reported -> complete (on all ranks), or given up

A window is of use once all ranks have it. So a rank that has its part waits for the others and
copies nothing meanwhile: the slowest disk sets the pace, and windows are passed over. A rank that
begins one gives up all before it, as does one whose copy fails; the others drop their part then.
Training never waits for any of it: a file in memory that is held has a substitute.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from moevement_ext.events import WindowOnDisk
from moevement_ext.memory.disk import KEPT, DiskWindows
from moevement_ext.memory.window.agreed import MAX_GIVEN_UP, NOTHING_AGREED, Agreed
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import RankIdentity, WindowName
from moevement_ext.protect.persistence import PersistenceBoard
from moevement_ext.protect.statistics import CaptureStatistics
from moevement_ext.token_bucket import TokenBucket

GIGA = 1e9
_ROLL_BACK_SECONDS = 10.0
_STOP_SECONDS = 10.0
# Without work for the disk, after which is measured what lies on it.
_IDLE_SECONDS = 1.0


class DiskSettings(NamedTuple):
    """How often, and how fast."""

    every: int
    """Iterations at least from the start of a window on disk to the start of the next."""
    bytes_per_s: float
    """At most, of this rank."""
    complete: WindowName | None = None
    """Newest window that all ranks had on disk when the job began."""


class _CopyEnds(Exception):
    """There is no use in this copy any more."""


class DiskTier:
    """The disk of one rank in training.

    Args:
        disk: where windows go.
        windows: of this rank, in memory.
        identity: of this rank.
        settings: how often, and how fast.
        board: makes the board that counts copies, given what it is to call with what all agree on.
        statistics: told of what goes wrong.
    """

    def __init__(
        self,
        disk: DiskWindows,
        windows: OwnerWindows,
        identity: RankIdentity,
        settings: DiskSettings,
        board: Callable[[Callable[[Agreed], None]], PersistenceBoard],
        statistics: CaptureStatistics,
    ) -> None:
        self._disk = disk
        self._windows = windows
        self._identity = identity
        self._settings = settings
        self._statistics = statistics
        self._changed = threading.Condition()
        self._offered: WindowName | None = None
        self._tried: WindowName | None = None
        self._pending: WindowName | None = None  # being copied, or copied and not yet everywhere
        self._agreed = self._settled = NOTHING_AGREED
        self._complete = [] if settings.complete is None else [settings.complete]
        self._newest = max((window.name.start for window in disk.stored()), default=-1)
        self._back_to: int | None = None  # what is later is still to be set aside
        self._rollbacks: deque[tuple[int, threading.Event]] = deque()
        self._stopping = False
        if settings.complete is not None:
            statistics.on_disk = settings.complete.start
        statistics.disk_bytes = disk.used_bytes()
        self._board = board(self.agreed)
        self._board.look()  # a new process joins a job that has windows on disk
        self._thread = threading.Thread(target=self._run, name='sparse-ckpt-disk', daemon=True)
        self._thread.start()

    def persisted(self, window: WindowName) -> None:
        """All ranks have this window in memory. Called by any thread; never blocks."""
        with self._changed:
            self._offered = window
            self._changed.notify()

    def agreed(self, agreed: Agreed) -> None:
        """Note what all ranks have on disk. Called by the board's thread."""
        with self._changed:
            self._agreed = agreed
            self._changed.notify()

    def withdraw_after(self, window: WindowName) -> None:
        """This rank goes back to `window`: what it has of later ones is not recovered from.

        Called by the training thread, in a recovery. It waits only where something later is on
        disk, or under way, which is rare: a recovery starts from the newest persisted window.
        """
        if self._goes_back_to(window.start):
            self._board.withdraw_after(window)

    def refuse(self, window: WindowName) -> None:
        """Nothing recovers from `window` any more, nor from later ones. As `withdraw_after`."""
        self._goes_back_to(window.start - 1)

    def _goes_back_to(self, start: int) -> bool:
        """Have later windows set aside; False if there are none."""
        with self._changed:
            if self._newest <= start:
                return False
            done = threading.Event()
            self._rollbacks.append((start, done))
            self._changed.notify()
        if not done.wait(_ROLL_BACK_SECONDS):
            self._statistics.degraded(
                f'the disk does not answer: windows after {start} are still there'
            )
        return True

    def stop(self) -> None:
        """End the threads; one that waits for a disk that does not answer is left behind."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(_STOP_SECONDS)
        self._board.stop()

    # The disk's thread

    def _run(self) -> None:
        measured = True
        while True:
            with self._changed:
                work = self._changed.wait_for(self._has_work, None if measured else _IDLE_SECONDS)
                if self._stopping:
                    return
            try:
                if work:
                    self._step()
                else:  # nobody waits for this thread
                    self._statistics.disk_bytes = self._disk.used_bytes()
            except Exception as error:  # costs protection, never the training (invariant I6)
                self._statistics.degraded(f'windows on disk: {error}')
            measured = not work

    def _has_work(self) -> bool:
        news = bool(self._rollbacks) or self._agreed is not self._settled
        return self._stopping or news or self._next() is not None

    def _next(self) -> WindowName | None:
        """The window to copy now, None if there is none."""
        offered = self._offered
        if offered is None or self._pending is not None or offered == self._tried:
            return None
        least = self._complete[-1].start + self._settings.every if self._complete else 0
        if offered.start < least or self._agreed.is_given_up(offered.start):
            return None
        return offered

    def _step(self) -> None:
        while self._rollbacks:
            start, done = self._rollbacks.popleft()
            try:
                self._go_back_to(start)
            finally:
                done.set()
        if self._agreed is not self._settled:
            agreed = self._agreed
            try:
                self._settle(agreed)
            finally:
                if agreed.persisted is not None:
                    self._note_complete(agreed.persisted)
        with self._changed:
            window = self._next()
            self._tried = window or self._tried
            self._pending = window or self._pending
        if window is not None:
            self._copy(window)

    def _go_back_to(self, start: int) -> None:
        with self._changed:
            self._forget_complete_after(start)
            self._newest = min(self._newest, start)
            self._tried = self._pending = None
            if self._offered is not None and self._offered.start > start:
                self._offered = None
            self._back_to = start if self._back_to is None else min(self._back_to, start)
        self._set_aside()

    def _set_aside(self) -> None:
        """Before anything is copied; what others captured anew must not meet a part of the past."""
        if self._back_to is not None:
            self._disk.set_aside_after(self._back_to, self._identity)
            self._back_to = None

    def _forget_complete_after(self, start: int) -> None:
        self._complete = [window for window in self._complete if window.start <= start]

    def _settle(self, agreed: Agreed) -> None:
        """Act on what all ranks agree on."""
        self._settled = agreed
        pending = self._pending
        if pending is not None and agreed.is_given_up(pending.start):
            self._pending = None
            self._disk.discard(pending)
        elif pending is not None and agreed.is_persisted(pending.start):
            self._pending = None

    def _note_complete(self, newest: WindowName) -> None:
        """All ranks have a window on disk: older ones may go."""
        if self._complete and newest.start < self._complete[-1].start:  # other ranks went back
            self._forget_complete_after(newest.start)
            self._tried = None
        if newest not in self._complete and self._disk.has(newest):
            self._complete = [*self._complete, newest][-KEPT:]
            self._disk.note_complete(newest.start)
            self._statistics.on_disk = newest.start
            self._statistics.events.emit(WindowOnDisk(start=newest.start, plan=newest.plan))
            if len(self._complete) == KEPT:
                self._disk.prune(self._complete)

    def _copy(self, window: WindowName) -> None:
        self._board.give_up(
            range(max(window.start - MAX_GIVEN_UP, 0), window.start)
        )  # and all before
        self._newest = max(self._newest, window.start)
        file = self._windows.hold(window)
        try:
            self._set_aside()
            if file is None:
                raise _CopyEnds('it is not in memory any more')
            self._disk.write(file, self._identity, self._pace(window, file))
        except _CopyEnds:
            self._give_up(window)
        except Exception as error:
            self._statistics.degraded(f'window {window.start} is not copied to disk: {error}')
            self._give_up(window)
        else:
            self._board.report(window)
        finally:
            if file is not None:
                self._windows.release(file)

    def _give_up(self, window: WindowName) -> None:
        self._board.give_up([window.start])
        self._pending = None

    def _pace(self, window: WindowName, file: WindowFile) -> Callable[[int], None]:
        """Waits as long as the rate demands, and ends a copy that is of no use."""

        def useless() -> bool:
            return (
                self._stopping
                or bool(self._rollbacks)
                or self._agreed.is_given_up(window.start)
                or not self._windows.is_held(file)
            )

        def wait(seconds: float) -> bool:
            with self._changed:
                return self._changed.wait_for(useless, seconds)

        bucket = TokenBucket(wait)

        def advance(nbytes: int) -> None:
            if bucket.take(nbytes, self._settings.bytes_per_s):
                raise _CopyEnds

        return advance
