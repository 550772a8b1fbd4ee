# SPDX-License-Identifier: Apache-2.0
"""Membership of this process in the job: the present round, its end, and the next round.

A process goes through rounds (see `rendezvous`): it *meets* the other ranks, sets up or recovers,
trains, and *leaves* when the round ends. Which thread meets and leaves depends on the state:

- *Setting up*, before `settle`, a new process of a running job cannot be interrupted: it builds its
  model. A separate thread joins the first round (`wait_for_first_rendezvous`), and later rounds
  when that one is broken, so that the process does not count as hung. It submits the report from
  the start of the process, which has no other state yet, and captures nothing. `settle` gives the
  training thread the newest rendezvous only: in the earlier ones no rank has trained, as all ranks
  wait for the new process.
- *From `settle` on* only the training thread leaves and meets. Its waits end: process groups,
  stores and barriers raise. Other calls (a write, a loader) are not interrupted.
- *During a replay* another thread can meet in its place (see `beside`), while it continues.
- A training thread that is stuck, in an ended wait or elsewhere, cannot leave. Another thread ends
  the process with status `EXIT_STUCK`, and its launcher replaces it.
- A training thread that waits for longer than a collective may take ends the round: another rank
  hangs although it sends heartbeats, or the network hangs. This need not cost a process.
- Heartbeats continue until the training thread has left: the other ranks wait for a late rank as
  long as it sends them.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import NamedTuple, NoReturn

import msgspec
from torch.distributed import DistError, PrefixStore, Store

from moevement_ext.errors import EXIT_WHOLE_JOB, SparseCheckpointError
from moevement_ext.logger import logger_of
from moevement_ext.membership.rendezvous import (
    FencedOut,
    Rendezvous,
    RendezvousResult,
    RoundEnded,
    end_round,
    how_broken,
    is_broken,
)
from moevement_ext.membership.rendezvous_runner import (
    Beside,
    Met,
    RendezvousRunner,
    waiting_survivor,
)
from moevement_ext.membership.report import NOWHERE, Report, decode_all
from moevement_ext.membership.round_watch import LOOK_S, Connections, RoundWatch
from moevement_ext.membership.standstill import Standstill, ends_within, replace_this_process
from moevement_ext.membership.store_loss import StoreLoss, StoreLost
from moevement_ext.membership.training_thread import TrainingThread
from moevement_ext.regroup.interruptible_store import InterruptibleStore
from moevement_ext.regroup.process_groups import ProcessGroups, connect_timeout
from moevement_ext.system.leaving import end_at_once

logger = logger_of(__name__)

_UPDATE_GRACE_S = 1.0
_CLOSING = timedelta(seconds=20)
_UNBLOCK_S = 30.0  # a GPU may never release its waits


class _Joined(NamedTuple):
    """A round that this process has joined."""

    result: RendezvousResult
    reports: list[Report]
    watch: RoundWatch


class Membership:
    """Takes part in the rounds of the job.

    Made by `join`.

    Attributes:
        reports: reports of all ranks in the training thread's round, by rank; before
            `wait_for_first_rendezvous`, of a process that joins a running job, one survivor's.
        origin: round in which all ranks of this attempt of the job started together.
        joining: this process has joined a running job.
        committed: newest iteration committed on this rank; written by the training thread.
        not_updating: clear while the optimizer writes, so that an update which its ranks can
            complete is not cut off.
        reason: why the round ended that this rank left.
        detect_s: seconds from that end until `leave`.
        ended_round: that `leave` ended the round, and nothing had interrupted this rank before.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        timeout: timedelta,
        hang_timeout_s: float,
        first_report: Report,
        stuck_timeout_s: float,
    ) -> None:
        self._rendezvous = rendezvous
        self._store = store = rendezvous.store
        self._loss = StoreLoss(store, hang_timeout_s, self._without_store)
        self._runner = RendezvousRunner(rendezvous, self._loss, timeout)
        self._watching = Connections(self._loss.connect)
        self._timeout = timeout
        self._hang_timeout_s = hang_timeout_s
        self._groups: ProcessGroups | None = None
        self.reports: list[Report] = []
        self.origin = self.committed = NOWHERE
        self.joining = self.ended_round = False
        self._standstill = Standstill(rendezvous.rank, timeout.total_seconds(), stuck_timeout_s)
        self._wake: Callable[[], None] = lambda: None
        self._closed = threading.Event()
        # Held by a thread that joins in place of the training thread.
        self._setting_up = threading.Lock()
        self._settled = False
        self._beside: Beside | None = None
        self._lost: SparseCheckpointError | None = None
        self.reason = ''
        self.detect_s = 0.0
        self.not_updating = threading.Event()
        self.not_updating.set()
        self._first_report = first_report
        self._interrupted = threading.Event()
        self._first: threading.Thread | None = None
        self._taken: RendezvousResult | None = None
        self._newest: _Joined | None = None

    @classmethod
    def join(
        cls,
        rendezvous: Rendezvous,
        timeout: timedelta,
        hang_timeout_s: float,
        report: Callable[[], Report],
        stuck_timeout_s: float = 0.0,
    ) -> 'Membership':
        """Wait for all ranks, unless a survivor is already waiting.

        In that case a helper thread meets the ranks during the set-up.

        Args:
            rendezvous: this process's rendezvous in the launcher's store.
            timeout: limit of waits for other ranks, and of a collective.
            hang_timeout_s: seconds after which an unreachable store counts as lost.
            report: makes this process's report for each rendezvous during its set-up; called once.
            stuck_timeout_s: as of `Standstill`; also applies to the set-up of a process that joins
                a running job.
        """
        rendezvous.predecessor_took_part()
        member = cls(rendezvous, timeout, hang_timeout_s, report(), stuck_timeout_s)
        member._meet_first(waiting_survivor(rendezvous))
        return member

    def _meet_first(self, waiting: Report | None) -> None:
        with self._setting_up:
            if waiting is None:
                self._take(self._runner.meet_first(self._first_report))
            else:
                self.reports = [waiting]
            # Within the lock: if the round has ended, a thread that joins the next one reads these.
            self.origin = max([one.origin for one in self.reports if one.survivor] or [NOWHERE])
            self.joining = self.origin != NOWHERE
            if not self.joining:
                self.origin = self.taken.round
        if waiting is not None:
            self._first = self._start(partial(self._join_beside, None))

    @property
    def taken(self) -> RendezvousResult:
        """The training thread's round."""
        assert self._taken is not None  # else `wait_for_first_rendezvous` has not returned
        return self._taken

    @property
    def newest_round(self) -> int:
        """The newest round that this process has joined, on whichever thread."""
        return self._joined.result.round

    @property
    def _joined(self) -> '_Joined':
        """The newest round that this process has joined."""
        assert self._newest is not None  # as in `taken`
        return self._newest

    @property
    def store(self) -> Store:
        """Store for keys of the training thread's round."""
        return self.taken.store

    @property
    def archive(self) -> Store:
        """Store for keys of this attempt of the job, which lasts until all ranks start again."""
        # The name of the attempt keeps processes that outlive their store from writing keys of the
        # next attempt.
        return PrefixStore(f'job/{self._loss.attempt}/{self.origin}', self._store.clone())

    @property
    def store_lost(self) -> threading.Event:
        """Set while the launcher's store counts as lost."""
        return self._loss.lost

    @property
    def broken(self) -> bool:
        """True once the training thread must leave: a failure was announced in the round."""
        return self._interrupted.is_set()

    def broken_in_the_store(self) -> bool:
        """The same, read from the store now, since a silently lost connection is detected late.

        While the store is unreachable, waits until it counts as lost.
        """
        try:
            return is_broken(self._loss.reconnect(), self._joined.result.round)
        except (DistError, StoreLost):
            return False

    def end_soon(self, round_id: int, reason: str) -> None:
        """End a round that the coordinator has found over, if this process is in it. Any thread."""
        joined = self._joined
        if joined.result.round == round_id:
            joined.watch.end_soon(reason)

    def wait_for_first_rendezvous(self) -> None:
        """Wait for the rendezvous that another thread joins in the set-up. Training thread."""
        if self._first is not None:
            self._first.join()

    def settle(self) -> None:
        """End the set-up; `reports` and `store` are those of the newest rendezvous.

        Called by the training thread, which alone leaves and meets from now on. Waits for a
        rendezvous that is in progress.

        Raises:
            FencedOut: this process has been replaced meanwhile.
            SparseCheckpointError: a rank did not respond in time.
        """
        self.wait_for_first_rendezvous()
        with self._setting_up:
            self._settled = True
        if self._lost is not None:
            raise self._lost

    def watch(self, distributed_backend: str, wake: Callable[[], None]) -> None:
        """From now on, end waits of this process when the round ends, and report hanging ranks.

        Training thread. Called when process groups exist: by then all ranks are set up, except new
        processes. `wake`, called on the watching thread, ends waits that are not torch's.
        """
        self._wake = wake
        self._standstill.thread = TrainingThread()
        if self._groups is None:
            self._groups = ProcessGroups(distributed_backend, self._timeout)
        if self.broken:
            self._unblock()

    def leave(self, reason: str) -> None:
        """Announce a failure in the present round, unless one is known; unblock this process.

        Ends the process if its GPU is lost: its report would promise a state that is gone. Sets
        `reason`, `detect_s` and `ended_round`.
        """
        if self._groups is not None:
            self._groups.end_calls()
        round_id, self.ended_round = self._joined.result.round, False
        while not self._announced(round_id, reason):
            pass
        self._joined.watch.wait_until_woken()
        # The announcement has another node's clock.
        self.detect_s = max(time.time() - self._joined.watch.announced, 0.0)
        self._check_device()  # still watched: if this call hangs, the process is replaced
        self._joined.watch.stop()
        self.reason = self._joined.watch.reason or reason

    def _announced(self, round_id: int, reason: str) -> bool:
        """Announce the failure over a new connection; False if that one is lost, too."""
        self._store = store = self._runner.reconnect()  # the old one may be lost
        try:
            if not self._joined.watch.broken.is_set():
                before = self.broken  # the watching thread also detects this announcement
                self.ended_round = end_round(store, round_id, reason) and not before
                found = how_broken(store, round_id, reason)
                self._joined.watch.conclude(found.reason, found.since)
        except DistError:
            return False
        return True

    def lose_device(self, what: str) -> NoReturn:
        """End this process, whose GPU is lost, and the round. Any thread."""
        self._lose_device(self._store.clone(), what, None)

    def _lose_device(self, store: Store, what: str, thread: TrainingThread | None) -> NoReturn:
        round_id, rank = self._joined.result.round, self._rendezvous.rank
        replace_this_process(store, round_id, rank, f'its GPU is lost: {what}', thread)

    def meet(self, report: Callable[[], Report]) -> list[Report]:
        """Join the round after the present one; returns the reports of all ranks, by rank.

        Raises:
            FencedOut: this process has been replaced, or the job has restarted without it.
            StoreLost: the store is lost, not only a connection.
            SparseCheckpointError: a rank did not respond in time.
        """
        if self._lost is not None:
            raise self._lost
        self._take(self._runner.meet(report, self._joined.result.round))
        self._check_same_attempt(self.reports)
        return self.reports

    def _check_same_attempt(self, reports: Sequence[Report]) -> None:
        if self.origin < max(other.origin for other in reports):
            raise FencedOut('the job was started again without this process, which ends')

    @contextmanager
    def delegated_to(self, beside: Beside) -> Iterator[None]:
        """Within the context a failure interrupts only a replay that cannot continue."""
        self._beside = beside
        try:
            if self._joined.watch.broken.is_set():  # it may have been before anybody knew of this
                raise RoundEnded(self._joined.watch.reason or 'unknown')
            yield
        finally:
            with self._setting_up:
                self._end_beside(beside)

    def take_over(self, beside: Beside, wait: bool) -> list[Met]:
        """Move to the newest round that was joined; returns and raises as `Beside.take`."""
        met = beside.take(wait)
        if met:
            self._taken, self.reports = met[-1].result, met[-1].reports
        return met

    def try_detach(self, beside: Beside) -> bool:
        """Let the training thread leave and meet again; False if it must first take over rounds."""
        with self._setting_up:
            if beside.has_met:
                return False
            self._end_beside(beside)
            return True

    def _end_beside(self, beside: Beside) -> None:
        """Called with the lock. A joining thread that has not begun yet will do nothing."""
        self._beside = None
        beside.end()
        if self._joined.watch.broken.is_set():
            self._interrupt()

    def barrier(self, name: str) -> None:
        """Wait for all ranks of the round; for a busy rank, as long as it lives.

        Raises:
            RoundEnded: a failure was announced meanwhile.
        """
        watched = self._standstill.thread is not None
        self._standstill.at_barrier = watched
        try:
            self._rendezvous.barrier(self.taken, name, None if watched else self._timeout)
        finally:
            self._standstill.at_barrier = False

    def renew(self, members: Collection[int] | None, kept: Collection[int] = ()) -> None:
        """Reconnect the process groups of `members` (None: all); silence others, except of `kept`.

        Raises `RoundEnded` if a failure was announced meanwhile.
        """
        assert self._groups is not None  # `watch` has made them
        self._raise_if_broken()
        timeout = min(self._timeout, connect_timeout(self._rendezvous.world_size))
        prefix = PrefixStore(f'groups/{"all" if members is None else min(members)}', self.store)
        store = InterruptibleStore(prefix, self._interrupted, timeout)
        try:
            self._groups.renew(store, members, timeout, kept)
        finally:
            if self.broken:
                self._groups.unblock()
        self._raise_if_broken()

    def synchronize(self) -> None:
        """Wait for all work queued on the GPU; the caller then checks `broken`."""
        if self._groups is not None:
            self._groups.synchronize()

    @property
    def waits_returned(self) -> bool:
        """True if waits of this round may have ended without an error, with undefined results."""
        return self._groups is not None and self._groups.waits_returned

    def silence(self) -> None:
        """Let all collectives return at once, without effect, until groups are connected."""
        if self._groups is not None:  # in a new process they do so from the start
            store = InterruptibleStore(self.store, threading.Event(), self._timeout)
            self._groups.renew(store, (), self._timeout)

    def stop(self) -> None:
        """Watch no rank any more, as all have trained to the end."""
        self._joined.watch.stop()
        self._closed.set()
        self._loss.close()

    def close(self) -> None:
        """End the job on all ranks, and the waits of this process's threads in the store.

        These threads wake up when the round ends; before that, all ranks must have stopped watching
        it.
        """
        self.stop()
        try:
            self._rendezvous.barrier(self._joined.result, 'over', _CLOSING)
            end_round(self._store, self._joined.result.round, 'the job is over')
            self._joined.watch.join()
            self._rendezvous.finish()
        except (SparseCheckpointError, DistError) as error:  # a rank, or the launcher, is gone
            logger.warning('exiting without waiting for the other ranks: %s', error)

    def _raise_if_broken(self) -> None:
        if self.broken:
            raise RoundEnded(self._joined.watch.reason or 'unknown')

    def _take(self, result: RendezvousResult) -> None:
        """Enter the next round. Training thread, or the thread that joins in its place."""
        # Set when the training thread must leave the round.
        self._interrupted = threading.Event()
        self._taken, self.reports = result, decode_all(result.reports)
        self._arrive(result, self.reports)

    def _arrive(self, result: RendezvousResult, reports: list[Report]) -> None:
        self._store = result.connection
        self._standstill.unblocked_at = None
        # Heartbeats from now on: the set-up of a new process may take long.
        watch = RoundWatch(
            self._watching,
            result.round,
            self._rendezvous.rank,
            self._on_broken,
            self._check_training_thread,
        )
        self._newest = _Joined(result, reports, watch)
        watch.start()

    def _on_broken(self, reason: str) -> None:
        """Called on the watching thread, or on the thread that leaves."""
        beside = self._beside
        if beside is None:
            self._interrupt()
        if beside is not None or not self._settled:
            next_one = partial(self._join_beside, self._joined.result.round)
            self._start(next_one if beside is None else partial(self._meet_beside, beside))

    def _start(self, join: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=join, name='sparse-ckpt-join', daemon=True)
        thread.start()
        return thread

    def _interrupt(self) -> None:
        """End all waits of the training thread, which must leave. Any thread."""
        self._interrupted.set()
        self.not_updating.wait(_UPDATE_GRACE_S)
        with ends_within(_UNBLOCK_S, self._rendezvous.rank, self._standstill.thread):
            self._unblock()
        self._standstill.unblocked_at = time.monotonic()

    def _unblock(self) -> None:
        if self._groups is not None:
            self._groups.unblock()
        self._wake()

    def _join_beside(self, after: int | None) -> None:
        """Join a round while the training thread sets up, with the process's first report."""
        with self._setting_up:
            if self._settled or not self.joining or self._lost is not None:
                return
            midway = msgspec.structs.replace(self._first_report, midway=True)
            try:
                self._take(self._meet_next(lambda: midway, after))
                self._check_same_attempt(self.reports)
            except SparseCheckpointError as error:  # raised by `settle`
                self._lost = error
                return
        if not any(report.survivor for report in self.reports):
            logger.warning('no rank with state is left; this process exits')
            end_at_once(EXIT_WHOLE_JOB)

    def _meet_beside(self, beside: Beside) -> None:
        """Join a round during a replay; interrupt the replay if it cannot continue."""
        with self._setting_up:
            if self._beside is not beside:
                return  # the training thread has left by itself
            (left, before, watch), goes_on = self._joined, False
            detect_s = max(time.time() - watch.announced, 0.0)
            try:
                result = self._meet_next(beside.report, left.round)
                reports = decode_all(result.reports)
                self._arrive(result, reports)
                self._check_same_attempt(reports)
                goes_on = beside.goes_on(reports)
                if goes_on:
                    # The other ranks wait until all know each other's addresses.
                    self._rendezvous.sign(result, 'ready')
                    beside.add(Met(watch.reason or '', detect_s, before, result, reports))
            except DistError:
                goes_on = False  # the training thread opens another connection
            except SparseCheckpointError as error:  # raised by `meet`
                self._lost = error
            finally:
                if not goes_on:
                    self._end_beside(beside)
                    self._interrupt()

    def _meet_next(self, report: Callable[[], Report], after: int | None) -> RendezvousResult:
        """Join in place of the training thread, over a separate connection."""
        if after is not None:
            self._joined.watch.stop()
            logger.warning('joining again: %s', self._joined.watch.reason)
        self._runner.reconnect()
        return self._runner.meet(report, after)

    def _check_training_thread(self, store: Store) -> None:
        """On the looking thread."""
        round_id = self._joined.result.round
        if self._standstill.thread is None:
            self._standstill.check_set_up(store, round_id, self.joining)
        else:
            world_size = self._rendezvous.world_size
            self._standstill.check(store, round_id, world_size, self.committed)

    def _check_device(self) -> None:
        """End this process if its GPU is lost."""
        if self._groups is None:
            return
        try:
            self._groups.check_device()
        except RuntimeError as error:
            self._lose_device(self._store, str(error), self._standstill.thread)

    def _without_store(self) -> None:
        """Interrupt this rank if others seem to have left, while the store is lost.

        On the thread `sparse-ckpt-lost`: without a store, no rank can announce that it has left.
        Waits from before the loss of the store, or before the newest iteration, do not count, as
        the other ranks had not left then.
        """
        self._standstill.got_on_to = None
        while self._loss.lost.is_set() and not self._closed.wait(LOOK_S):
            if self.broken:
                return
            if self._standstill.waits_for_others_s(self.committed) > self._hang_timeout_s:
                self._joined.watch.conclude('the store is lost, and the other ranks do not arrive')
