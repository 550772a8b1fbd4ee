# SPDX-License-Identifier: Apache-2.0
"""Lifecycle of a rank's windows: the only place with the whole state machine.

    free -> writing -> committed -> replicated -> reported -> persisted -> outdated -> free

The training thread opens a file for a window. The sealing thread commits the window. The
replicator's thread learns that all holders of replicas have it, and the client's thread that all
ranks and their holders have it. After a failure the training thread withdraws, keeps or re-offers
windows. `docs/design.md` says what happens to windows that are not persisted in time.
"""

import threading
import time
from collections.abc import Callable, Iterable

from moevement_ext import faults
from moevement_ext.events import WindowCommitted, WindowPersisted
from moevement_ext.faults import Phase
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import GENERATIONS
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import Agreed, WindowName
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.protect.persistence import WindowTracker
from moevement_ext.protect.statistics import CaptureStatistics
from moevement_ext.rates import helper_cpu_s
from moevement_ext.replicate.client import ReplicaClient
from moevement_ext.replicate.replicator import Replicator

# Seconds between checks whether the training thread waits in vain.
_LOOK_S = 0.01


class WindowLifecycle:
    """Follows the windows of one rank from a free file to persistence on all ranks.

    Args:
        peers: clients of the replica holders, by rank.
        tracker: factory of the tracker, given a callback for new agreements.
        on_persisted: called with each newly persisted window, on the client's thread.
        max_wait_s: longest wait of the training thread for a free file.

    Attributes:
        replicator: sends the windows to the peers.
    """

    def __init__(
        self,
        owner: int,
        windows: OwnerWindows,
        peers: dict[int, ReplicaClient],
        tracker: Callable[[Callable[[Agreed], None]], WindowTracker],
        on_persisted: Callable[[WindowName], None],
        statistics: CaptureStatistics,
        max_wait_s: float,
    ) -> None:
        self.statistics = statistics
        self._windows = windows
        self._on_persisted = on_persisted
        self._max_wait_s = max_wait_s
        self.in_vain: Callable[[], bool] = lambda: False
        """True if training aborts its iteration after a loss, when no window is persisted."""
        self._freed = threading.Event()
        self._stalled = False
        self._newest: WindowName | None = None
        self.replicator = Replicator(
            owner, peers, self.replicated, statistics.degraded, max_windows=GENERATIONS
        )
        self.replicator.hurries = lambda: self.in_vain()
        self._tracker = tracker(self.agreed)

    def stop(self) -> None:
        self.replicator.stop()

    # Training thread

    def open(self, name: WindowName) -> WindowFile | None:
        """Take a file for a window; wait at most `max_wait_s`.

        After a timeout, calls do not wait again until a window is persisted. Return None if
        there is no file, the window is complete already, or another rank has given it up.
        """
        if self._windows.file(name) is not None or self._windows.is_persisted(name):
            return None  # the window just recovered, which is protected already
        if self._windows.is_given_up(name):
            return None
        try:
            file = self._wait_for(lambda: self._windows.begin(name))
        except Exception as error:
            self.statistics.degraded(f'window {name.start} cannot be opened: {error}')
            self.give_up([name.start])
            return None
        self._stalled = file is None
        if file is None:
            self.skip(name.start)
        return file

    def skip(self, start: int) -> None:
        """Skip the window at `start` because the previous one was not persisted in time."""
        self.statistics.skipped_windows += 1
        self.statistics.degraded(
            f'window {start} is skipped: the one before is not persisted on every rank'
        )
        self.give_up([start])

    def newest_persisted(self, before: WindowName | None) -> tuple[bool, WindowName | None]:
        """Whether `before` was settled in time, and the newest persisted window, if any.

        Waits like `open` until `before` is persisted or given up.
        """
        windows = self._windows
        settled = before is None or self._wait_for(
            lambda: windows.is_persisted(before) or windows.is_given_up(before) or None
        )
        self._stalled = not settled
        return bool(settled), windows.newest_persisted

    def kept(self, name: WindowName | None) -> WindowFile | None:
        """Return the file of a complete window of this rank; None if it is gone."""
        return None if name is None else self._windows.file(name)

    def give_up(self, starts: Iterable[int]) -> None:
        """Report to all ranks that this rank lacks the windows with these starts. Any thread.

        The other ranks' parts would be useless and would block the file of a later window
        for ever.
        """
        self._tracker.give_up(starts)

    def abandon(self, name: WindowName, file: WindowFile) -> None:
        """Free the file of an unfinished window that no rank relies on."""
        self.replicator.abandon(name)
        try:
            self._windows.abandon(file)
        except Exception as error:
            self.statistics.degraded(f'{file.path} cannot be reused: {error}')

    def wait_until_persisted(self, name: WindowName, seconds: float) -> bool:
        """Return True once all ranks have the window, False after `seconds`."""
        deadline = time.perf_counter() + seconds
        while not self._windows.is_persisted(name):
            self._freed.clear()
            if self._windows.is_persisted(name):
                break
            if not self._freed.wait(max(deadline - time.perf_counter(), 0.0)):
                return False
        return True

    def _wait_for[T](self, attempt: Callable[[], T | None]) -> T | None:
        timeout_s = 0.0 if self._stalled and not self._freed.is_set() else self._max_wait_s
        deadline = time.perf_counter() + timeout_s
        while True:
            self._freed.clear()
            found = attempt()
            if found is not None:
                return found
            while not self._freed.is_set():
                remaining = deadline - time.perf_counter()
                if remaining <= 0 or self.in_vain():
                    return None
                self._freed.wait(min(remaining, _LOOK_S))

    # Other threads, in training

    def sealed(self, file: WindowFile, header: SlotHeader) -> None:
        """Commit and replicate a slot after all its copies. Sealing thread."""
        file.seal_slot(header)
        is_last = header.slot == header.window - 1
        if is_last:
            self._windows.commit(file)
        faults.point(Phase.REPLICATE)
        self.replicator.submit(file, header.slot)
        if is_last:  # after the rest, as the disk of the events may not answer
            self._note_committed(file, header)

    def _note_committed(self, file: WindowFile, last: SlotHeader) -> None:
        figures = self.statistics
        figures.committed = last.start
        figures.events.emit(
            WindowCommitted(
                start=last.start,
                plan=last.plan,
                slots=[file.payload(slot).size for slot in range(last.window)],
                training_s=round(figures.training_s, 6),
                exposed_s=round(figures.exposed_s, 6),
                copy_bytes_per_s=figures.copy_bytes_per_s,
                send_bytes_per_s=self.replicator.bytes_per_s(),
                helpers_s=round(helper_cpu_s(), 6),
                own_s=round(figures.own_s, 6),
                waits_s={rank: round(seconds, 6) for rank, seconds in figures.waits_s.items()},
            )
        )

    def replicated(self, window: WindowName) -> None:
        """Report a window that all holders have received. Replicator's thread."""
        self._tracker.report(window)

    def agreed(self, agreed: Agreed) -> None:
        """Apply an agreement of all ranks. Client's thread."""
        self.replicator.agree(agreed)  # before a file is reused for the next window to send
        self._windows.agree(agreed)
        self._freed.set()
        window = agreed.persisted
        if window is None or window == self._newest:
            return
        self._newest = window
        self.statistics.persisted = window.start
        self.statistics.events.emit(WindowPersisted(start=window.start, plan=window.plan))
        self._on_persisted(window)

    # Training thread, after a failure

    def withdraw_after(self, window: WindowName) -> None:
        """Withdraw windows after `window`, to which this rank will roll back."""
        self.replicator.abandon_after(window.start)
        self._tracker.withdraw_after(window)
        if self._newest is not None and self._newest.start > window.start:
            self._newest = window  # later ones may be persisted again

    def withdraw_unpersisted(self) -> None:
        """Withdraw windows whose holder is gone, until `change_peers` has replaced their copies."""
        self._tracker.withdraw_unpersisted()

    def go_back_to(self, window: WindowName) -> None:
        """Continue from `window`, which is protected; later windows are captured again."""
        self.withdraw_after(window)
        self._windows.persisted(window)
        self._windows.discard_after(window.start)
        self.replicator.discard_after(window.start)

    def forget_the_past(self) -> None:
        """Drop all windows, which belong to an abandoned history."""
        self._windows.discard_after(-1)
        self.replicator.discard_after(-1)

    def replicate_again(self, window: WindowName, file: WindowFile) -> None:
        """Replicate the window of the recovery again: a lost node may have held its replicas."""
        self.replicator.agree(self._windows.agreed.with_persisted(window))
        for slot in file.slots():
            self.replicator.submit(file, slot, urgent=True)

    def change_peers(self, peers: dict[int, ReplicaClient], newest: int) -> None:
        """Offer windows up to the one that starts at `newest` to holders whose process is new.

        Later windows will be captured again.
        """
        names = [window.name for window in self._windows.committed()]
        files = [self._windows.file(name) for name in names if name.start <= newest]
        self.replicator.set_peers(peers, [file for file in files if file is not None])
