# SPDX-License-Identifier: Apache-2.0
"""Decides when a window is persisted: when every rank and its replica holders have it.

Ranks report through the launcher's key-value store, on a separate thread, without training
communicators. The rank that completes the count publishes the window. A rank that rolls back loses
later windows, so it withdraws its reports of them. A rank that gives up a window reports this, and
the other ranks, which would wait for it, give it up as well. Keys:

    complete/<start>/<plan>   number of ranks that have reported this window
    counted/<rank>            the windows this rank has reported, also for the process after it
    persisted                 the newest window on all ranks, those given up since, and a number
                              that changes with every withdrawal

Publishing is a compare-and-set of `persisted`, with a read of the count in between. Withdrawing
lowers the count and then changes `persisted`. So a withdrawn window is never published, and a crash
between two steps never makes a count too high. Giving up is also a compare-and-set of `persisted`,
so all ranks see a window as either published or given up. A count whose change was not answered may
be too low for ever; its window is given up.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial

import msgspec
from torch.distributed import Store

from moevement_ext.logger import logger_of
from moevement_ext.memory.window.name import MAX_GIVEN_UP, NOTHING_AGREED, Agreed, WindowName
from moevement_ext.store.answers import peek

logger = logger_of(__name__)

_NEWEST = 'persisted'
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 1.0
# Pause before the next poll, as a part of the time that a window has been awaited.
_PART = 0.25
_REMEMBERED = 4
# Some attempts of the connection; none of them waits long for the next while a rank waits.
_WITHDRAW_SECONDS = 30.0
_STOP_SECONDS = 10.0


_NAMES = msgspec.json.Decoder(list[WindowName])


class _Standing(msgspec.Struct, frozen=True, array_like=True):
    """Value of the key `persisted`."""

    withdrawals: int = 0
    agreed: Agreed = NOTHING_AGREED


_STANDING = msgspec.json.Decoder(_Standing)


_TIMEOUT = timedelta(seconds=10)
_FIRST_RETRY_SECONDS = 0.2
_LAST_RETRY_SECONDS = 30.0


class StoreConnection:
    """Reconnecting store: torch's store does not reconnect (torch 2.15). Used by one thread.

    The timeout of `store`, a separate connection, is shortened. `consequence` names, for the
    log, the function that is lost while the store is unreachable.
    """

    def __init__(self, store: Store, consequence: str) -> None:
        store.set_timeout(_TIMEOUT)
        self.store = store
        self._consequence = consequence
        self._failures = 0

    def attempt(self, step: Callable[[], object], losses: type[Exception] = Exception) -> float:
        """Run `step`, which uses `store`, once, on a new connection if the last one was lost.

        Only `losses` mean a lost connection. Returns the seconds to wait before another
        attempt; 0 if `step` is done.
        """
        try:
            if self._failures:
                self.store = self.store.clone()
            step()
        except losses as error:
            self._failures += 1
            if self._failures == 1:  # torch itself logs every further attempt
                logger.warning(
                    "the launcher's store is out of reach, %s: %s", self._consequence, error
                )
            return min(_FIRST_RETRY_SECONDS * 2.0 ** min(self._failures, 16), _LAST_RETRY_SECONDS)
        if self._failures:
            logger.warning("the launcher's store is reached again")
        self._failures = 0
        return 0.0


class PersistenceTracker:
    """Counts complete windows over all ranks.

    `store`, reachable by all ranks, is used by the tracker's thread only. A window counts once
    per `rank`, even if a replacement process reports it again. `on_agreed` is called on the
    tracker's thread with each new agreement of all ranks.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, on_agreed: Callable[[Agreed], None]
    ) -> None:
        self._connection = StoreConnection(store, 'so no window is persisted')
        self._rank = rank
        self._world_size = world_size
        self._on_agreed = on_agreed
        self._changed = threading.Condition()
        self._tasks: deque[Callable[[], None]] = deque()
        self._counted: list[WindowName] | None = None  # as in the store; None: not read yet
        self._unsure: WindowName | None = None  # it may have been counted, or not
        self._awaited: WindowName | None = None
        self._reported_at = 0.0
        # Seconds from this rank's report of a window to persistence, for the newest windows.
        self._took_s: deque[float] = deque([0.0], _REMEMBERED)
        self._agreed = NOTHING_AGREED
        self._stopping = self._is_waited_for = False
        self._thread = threading.Thread(target=self._run, name='sparse-ckpt-tracker', daemon=True)
        self._thread.start()

    def report(self, window: WindowName) -> None:
        """Report that this rank and its replica holders have `window`. Never blocks."""
        self._enqueue(partial(self._count, window))

    def look(self) -> None:
        """Request a call of `on_agreed` with an existing agreement. Never blocks."""
        self._enqueue(lambda: None)

    def give_up(self, starts: Iterable[int]) -> None:
        """Give up windows with these starts, unless they are persisted. Never blocks."""
        newest = sorted(starts)[-MAX_GIVEN_UP:]
        if newest:
            self._enqueue(partial(self._give_up, newest))

    def withdraw_after(self, window: WindowName) -> None:
        """Undo the reports of this rank, or its predecessor, about windows after `window`.

        Called before any rank can report windows of the replay. Returns once the withdrawal
        is in the store, which takes some requests, or after a timeout if the store does not
        answer.
        """
        self._wait_for(partial(self._withdraw, window), f'windows after {window.start}')

    def withdraw_unpersisted(self) -> None:
        """Undo the reports of this rank about windows that are not persisted.

        A holder of their replicas is gone: they count again once its successor has them. Called
        before the successor can report its own part, which may be the last one. Otherwise as
        `withdraw_after`.
        """
        self._wait_for(self._withdraw_unpersisted, 'windows without all their copies')

    def stop(self) -> None:
        """End the thread; a thread that waits for a lost store is abandoned."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(_STOP_SECONDS)

    @property
    def _store(self) -> Store:
        return self._connection.store

    def _wait_for(self, task: Callable[[], None], what: str) -> None:
        done = threading.Event()

        def carry_out() -> None:
            task()
            done.set()

        self._enqueue(carry_out, waits=True)
        if not done.wait(_WITHDRAW_SECONDS):
            logger.warning(
                '%s could not be withdrawn in %g s; they may count as persisted too early',
                what,
                _WITHDRAW_SECONDS,
            )

    def _enqueue(self, task: Callable[[], None], waits: bool = False) -> None:
        with self._changed:
            self._tasks.append(task)
            self._is_waited_for |= waits
            self._changed.notify()

    def _run(self) -> None:
        pause = 0.0
        while True:
            with self._changed:
                if pause:  # after a failure
                    self._rest(pause)
                elif not self._tasks and not self._stopping:
                    self._changed.wait(self._until_next_look())
                if self._stopping:
                    return
            pause = self._connection.attempt(self._step)

    def _rest(self, pause_s: float) -> None:
        """Pause; shorter if a rank waits: its recovery continues without the store, too."""
        shortest_s = min(pause_s, _LONGEST_PAUSE_S)
        self._changed.wait_for(lambda: self._stopping or self._is_waited_for, pause_s - shortest_s)
        self._changed.wait_for(lambda: self._stopping, shortest_s)

    def _until_next_look(self) -> float | None:
        """Seconds to the next poll; the first poll is late, to spare the store shared by all."""
        if self._awaited is None:
            return None
        waited_s = time.monotonic() - self._reported_at
        pause_s = max(min(self._took_s) / 2 - waited_s, _PART * waited_s, _SHORTEST_PAUSE_S)
        return min(pause_s, _LONGEST_PAUSE_S)

    def _step(self) -> None:
        if self._unsure is not None:  # all ranks would wait for a count that is too low for ever
            self._give_up([self._unsure.start])
            self._unsure = None
        self._look()  # a persisted window is not counted again
        if not self._tasks:
            return
        while self._tasks:
            self._tasks[0]()  # stays in the queue until done, also after a lost connection
            self._tasks.popleft()
        with self._changed:
            self._is_waited_for &= bool(self._tasks)
        self._look()

    def _count(self, window: WindowName) -> None:
        if self._agreed.is_persisted(window.start) or self._agreed.is_given_up(window.start):
            return
        self._awaited, self._reported_at = window, time.monotonic()
        counted = self._counted_windows()
        first = window not in counted
        if first:
            self._note([*counted, window])
        if self._change_count(window, int(first)) == self._world_size:
            self._publish(window)

    def _publish(self, window: WindowName) -> None:
        """Publish the window, unless a rank withdraws it meanwhile."""
        while True:
            found = self._read()
            standing = _decoded(found)
            agreed = standing.agreed
            if agreed.is_persisted(window.start) or agreed.is_given_up(window.start):
                return
            if self._store.add(_key(window), 0) != self._world_size:
                return
            wanted = _Standing(standing.withdrawals, agreed.with_persisted(window))
            if self._replace(found, wanted):
                break
        self._store.delete_key(_key(window))  # all ranks have counted; keep the store small

    def _give_up(self, starts: Sequence[int]) -> None:
        while True:
            found = self._read()
            standing = _decoded(found)
            agreed = standing.agreed.with_given_up(starts)
            if agreed == standing.agreed:
                return
            if self._replace(found, _Standing(standing.withdrawals, agreed)):
                return

    def _withdraw(self, window: WindowName) -> None:
        agreed = _decoded(self._read()).agreed
        counted = self._counted_windows()
        kept = [other for other in counted if other.start <= window.start]
        for other in counted:
            if other.start > window.start and not agreed.is_persisted(other.start):
                self._take_back(other)
        if kept != counted:
            self._note(kept)
        if kept != counted or agreed.is_outdated(window):
            self._void_publication(window)
        if self._awaited is not None and self._awaited.start > window.start:
            self._awaited = max(kept, default=None)

    def _withdraw_unpersisted(self) -> None:
        agreed = _decoded(self._read()).agreed
        counted = self._counted_windows()
        kept = [other for other in counted if agreed.is_persisted(other.start)]
        if kept == counted:
            return
        for other in counted:
            if other not in kept:
                self._take_back(other)
        self._note(kept)
        found = self._read()
        # Invalidates pending publications, as does any other change of the key meanwhile.
        self._replace(found, _Standing(_decoded(found).withdrawals + 1, _decoded(found).agreed))
        self._awaited = None

    def _take_back(self, window: WindowName) -> None:
        """Lower the count of a window, unless it was published: then its count is deleted.

        A new process cannot tell from `persisted` whether other ranks have rolled back
        before it.
        """
        if self._store.check([_key(window)]):
            self._change_count(window, -1)

    def _change_count(self, window: WindowName, by: int) -> int:
        """The new count; if the answer is lost, it is not known, and the window is given up."""
        self._unsure = window if by else None
        count = self._store.add(_key(window), by)
        self._unsure = None
        return count

    def _void_publication(self, window: WindowName) -> None:
        """Invalidate pending publications and set `persisted` back to at most `window`."""
        while True:
            found = self._read()
            standing = _decoded(found)
            agreed, lost = standing.agreed, standing.agreed.persisted
            if agreed.is_outdated(window):
                agreed = Agreed(window, agreed.given_up)
            if self._replace(found, _Standing(standing.withdrawals + 1, agreed)):
                if lost is not None and lost != agreed.persisted:
                    self._store.delete_key(_key(lost))  # its publisher may be the rank that died
                return
            if not _decoded(self._read()).agreed.is_outdated(window):
                return  # another rank has just changed the key, which suffices

    def _look(self) -> None:
        agreed = _decoded(self._read()).agreed
        if agreed != self._agreed:
            self._agreed = agreed
            if agreed.persisted is not None:
                self._forget_until(agreed.persisted)
            self._tell(agreed)
        awaited = None if self._awaited is None else self._awaited.start
        if awaited is None:
            return
        if agreed.is_persisted(awaited):
            self._took_s.append(time.monotonic() - self._reported_at)
        if agreed.is_persisted(awaited) or agreed.is_given_up(awaited):
            self._awaited = None

    def _tell(self, agreed: Agreed) -> None:
        try:
            self._on_agreed(agreed)
        except Exception:
            logger.exception('all ranks agree on %s, but', agreed)

    def _forget_until(self, persisted: WindowName) -> None:
        """Remove counts of older windows, which some rank skipped and no rank will complete."""
        counted = self._counted_windows()
        for window in counted:
            if window.start < persisted.start:
                self._store.delete_key(_key(window))
        self._counted = [window for window in counted if window.start > persisted.start]

    def _counted_windows(self) -> list[WindowName]:
        """Windows that this rank has reported; only this rank writes the key."""
        if self._counted is None:
            found = peek(self._store, f'counted/{self._rank}') or b'[]'
            self._counted = _NAMES.decode(found)
        return self._counted

    def _note(self, counted: list[WindowName]) -> None:
        self._store.set(f'counted/{self._rank}', msgspec.json.encode(counted).decode())
        self._counted = counted

    def _read(self) -> str:
        return (peek(self._store, _NEWEST) or b'').decode()

    def _replace(self, found: str, standing: _Standing) -> bool:
        """Compare and set `persisted`; False if its value is no longer `found`."""
        wanted = msgspec.json.encode(standing).decode()
        return bytes(self._store.compare_set(_NEWEST, found, wanted)).decode() == wanted


def _decoded(value: str) -> _Standing:
    return _STANDING.decode(value) if value else _Standing()


def _key(window: WindowName) -> str:
    return f'complete/{window.start}/{window.plan}'
