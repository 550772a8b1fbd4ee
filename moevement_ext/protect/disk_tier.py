# SPDX-License-Identifier: Apache-2.0
"""Copies persisted windows to disk, at a limited rate, on a separate thread.

    offered -> held -> copied and verified -> reported -> complete (on all ranks), or given up

A window is useful once all ranks have it on disk. So a rank that has finished its part waits for
the other ranks before it copies again: the slowest disk sets the pace, and windows are skipped. A
rank that begins a window, or whose copy fails, gives up all earlier windows, and the other ranks
drop their parts. Training never waits for the disk: a held file in memory has a substitute.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from moevement_ext.events import WindowOnDisk
from moevement_ext.memory.disk import KEPT, DiskWindows
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import (
    MAX_GIVEN_UP,
    NOTHING_AGREED,
    Agreed,
    RankIdentity,
    WindowName,
)
from moevement_ext.memory.window.refusal import UNKNOWN, UnreadableWindow
from moevement_ext.protect.persistence import WindowTracker
from moevement_ext.protect.statistics import CaptureStatistics
from moevement_ext.rates import TokenBucket

_ROLL_BACK_S = 10.0
_STOP_S = 10.0
# Idle seconds before the used disk space is measured.
_IDLE_S = 1.0


class _CopyEnds(Exception):
    """The current copy has become useless."""


class DiskTier:
    """The disk tier of one rank.

    Args:
        every: minimum iterations between the starts of two windows on disk.
        bytes_per_s: rate limit of this rank.
        tracker: makes the tracker that counts copies, given a callback for new agreements.
        complete: the newest window that all ranks had on disk when the job began.
    """

    def __init__(
        self,
        disk: DiskWindows,
        windows: OwnerWindows,
        identity: RankIdentity,
        every: int,
        bytes_per_s: float,
        tracker: Callable[[Callable[[Agreed], None]], WindowTracker],
        statistics: CaptureStatistics,
        complete: WindowName | None = None,
    ) -> None:
        self._disk = disk
        self._windows = windows
        self._identity = identity
        self._every = every
        self._bytes_per_s = bytes_per_s
        self._statistics = statistics
        self._changed = threading.Condition()
        self._offered: WindowName | None = None
        self._tried: WindowName | None = None
        self._pending: WindowName | None = None  # being copied, or copied on this rank only
        self._agreed = self._settled = NOTHING_AGREED
        self._complete = [] if complete is None else [complete]
        stored: list[WindowName] = []
        self._newest = UNKNOWN
        with suppress(UnreadableWindow):
            stored = [window.name for window in disk.stored()]
            self._newest = max((window.start for window in stored), default=-1)
        self._back_to: int | None = None  # later windows must be set aside
        self._rollbacks: deque[tuple[int, threading.Event]] = deque()
        self._last: WindowName | None = None  # if set, no other window is copied
        self._stopping = False
        if complete is not None:
            statistics.on_disk = complete.start
        self._tracker = tracker(self.agreed)
        for window in stored:  # of the process before
            self._tracker.report(window)
        self._thread = threading.Thread(target=self._run, name='sparse-ckpt-disk', daemon=True)
        self._thread.start()

    def persisted(self, window: WindowName) -> None:
        """Note that all ranks have this window in memory. Any thread; never blocks."""
        with self._changed:
            self._offered = window
            self._changed.notify()

    def keep_last(self, window: WindowName, timeout_s: float) -> bool:
        """Copy the last persisted window of a job: at once, at full speed. Training thread.

        True once all ranks have it on disk; False after the timeout.
        """

        def complete() -> bool:
            return bool(self._complete) and self._complete[-1].start >= window.start

        with self._changed:
            if not complete():
                self._last = self._offered = window
                self._changed.notify()
            return self._changed.wait_for(complete, timeout_s)

    def agreed(self, agreed: Agreed) -> None:
        """Note the ranks' agreement about windows on disk. Client's thread."""
        with self._changed:
            self._agreed = agreed
            self._changed.notify()

    def withdraw_after(self, window: WindowName) -> None:
        """Roll back to `window`: no recovery uses later windows of this rank on disk.

        Called by the training thread, in a recovery. Waits only if a later window is on
        disk or in copy, which is rare, as a recovery starts from the newest persisted
        window.
        """
        if self._goes_back_to(window.start):
            self._tracker.withdraw_after(window)

    def _goes_back_to(self, start: int) -> bool:
        """Set later windows aside; False if there are none."""
        with self._changed:
            if self._newest <= start:
                return False
            done = threading.Event()
            self._rollbacks.append((start, done))
            self._changed.notify()
        if not done.wait(_ROLL_BACK_S):
            self._statistics.degraded(
                f'the disk does not answer: windows after {start} are still there'
            )
        return True

    def stop(self) -> None:
        """End the threads; a thread that waits for a hung disk is abandoned."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(_STOP_S)

    # The disk's thread

    def _run(self) -> None:
        # Measured on this thread, so that a failing file system does not end the training thread.
        measured = False
        while True:
            with self._changed:
                work = self._changed.wait_for(self._has_work, None if measured else _IDLE_S)
                if self._stopping:
                    return
            try:
                if work:
                    self._step()
                else:  # no thread waits for this one
                    self._statistics.disk_bytes = self._disk.used_bytes()
            except Exception as error:  # costs protection, never the training (invariant I6)
                self._statistics.degraded(f'windows on disk: {error}')
            measured = not work

    def _has_work(self) -> bool:
        news = bool(self._rollbacks) or self._agreed is not self._settled
        return self._stopping or news or self._next() is not None

    def _next(self) -> WindowName | None:
        offered = self._offered
        if offered is None or self._pending is not None or offered == self._tried:
            return None
        every = 0 if offered == self._last else self._every
        least = self._complete[-1].start + every if self._complete else 0
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
        """Set windows aside before any copy: new captures must not mix with abandoned history."""
        if self._back_to is not None:
            self._disk.set_aside_after(self._back_to, self._identity)
            self._back_to = None

    def _forget_complete_after(self, start: int) -> None:
        self._complete = [window for window in self._complete if window.start <= start]

    def _settle(self, agreed: Agreed) -> None:
        self._settled = agreed
        pending = self._pending
        if pending is not None and agreed.is_given_up(pending.start):
            self._pending = None
            self._disk.discard(pending)
        elif pending is not None and agreed.is_persisted(pending.start):
            self._pending = None

    def _note_complete(self, newest: WindowName) -> None:
        """Record a window on the disks of all ranks, and delete older ones."""
        if self._complete and newest.start < self._complete[-1].start:  # other ranks rolled back
            self._forget_complete_after(newest.start)
            self._tried = None
        if newest not in self._complete and self._disk.has(newest):
            self._complete = [*self._complete, newest][-KEPT:]
            self._disk.note_complete(newest.start)
            self._statistics.on_disk = newest.start
            self._statistics.events.emit(WindowOnDisk(start=newest.start, plan=newest.plan))
            if len(self._complete) == KEPT:
                self._disk.prune(self._complete)
            with self._changed:
                self._changed.notify_all()  # the training thread may wait for it

    def _copy(self, window: WindowName) -> None:
        # A full list of given up windows stands for all earlier ones, too (see `Agreed`).
        self._tracker.give_up(range(max(window.start - MAX_GIVEN_UP, 0), window.start))
        self._newest = max(self._newest, window.start)
        file = self._windows.hold(window)
        try:
            self._set_aside()
            if file is None:
                raise _CopyEnds('it is not in memory any more')
            began = time.perf_counter()
            self._disk.write(file, self._identity, self._pace(window, file))
            self._statistics.persist_s = time.perf_counter() - began
        except _CopyEnds:
            self._give_up(window)
        except Exception as error:
            self._statistics.degraded(f'window {window.start} is not copied to disk: {error}')
            self._give_up(window)
        else:
            self._tracker.report(window)
        finally:
            if file is not None:
                self._windows.release(file)

    def _give_up(self, window: WindowName) -> None:
        self._tracker.give_up([window.start])
        self._pending = None

    def _pace(self, window: WindowName, file: WindowFile) -> Callable[[int], None]:
        """Return a function that waits to keep the rate, and ends a useless copy."""

        def useless() -> bool:
            return (
                self._stopping
                or bool(self._rollbacks)
                or self._agreed.is_given_up(window.start)
                or not file.held
                or self._last not in (None, window)
            )

        def wait(seconds: float) -> bool:
            with self._changed:
                return self._changed.wait_for(useless, seconds)

        bucket = TokenBucket(wait)

        def advance(nbytes: int) -> None:
            rate = None if window == self._last else self._bytes_per_s
            if bucket.take(nbytes, rate):
                raise _CopyEnds

        return advance
