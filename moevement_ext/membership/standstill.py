# SPDX-License-Identifier: Apache-2.0
"""Reacts to a training thread that stands still, in this process or in another one.

A thread that is stuck by itself, or in an ended wait, will never leave: its process ends, and its
launcher replaces it. If a thread waits for others longer than a collective may last, its process
ends the round: a rank that still sends heartbeats hangs, or the network hangs.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from torch.distributed import DistError, Store

from moevement_ext.errors import EXIT_STUCK
from moevement_ext.logger import logger_of
from moevement_ext.membership.counters import send_heartbeat
from moevement_ext.membership.rendezvous import NO_RANK, end_round
from moevement_ext.membership.report import NOWHERE
from moevement_ext.membership.round_watch import LOOK_S, LOOKS_PER_HEARTBEAT
from moevement_ext.membership.store_loss import StoreLoss
from moevement_ext.membership.training_thread import Probe, TrainingThread
from moevement_ext.system.leaving import end_at_once

logger = logger_of(__name__)


def replace_this_process(
    store: Store, round_id: int, rank: int, what: str, thread: TrainingThread | None
) -> NoReturn:
    """End this process and its round, so that its launcher starts another one. Any thread.

    `store` is a connection of the calling thread; `what` is the reason; `thread` is the stuck
    thread, if any.
    """
    _log(rank, what, thread)
    with suppress(DistError):  # its launcher detects the exit
        end_round(store, round_id, f'rank {rank} is stuck: {what}')
    end_at_once(EXIT_STUCK)


@contextmanager
def ends_within(limit_s: float, rank: int, thread: TrainingThread | None) -> Iterator[None]:
    """End this process if the code in the context, which ends the waits of `thread`, takes longer.

    No other rank could detect that, as this rank still sends heartbeats.
    """
    done = threading.Event()

    def wait() -> None:
        if not done.wait(limit_s):
            _log(rank, f'its waits have not ended within {limit_s:g} s', thread)
            end_at_once(EXIT_STUCK)

    threading.Thread(target=wait, name='sparse-ckpt-limit', daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _log(rank: int, what: str, thread: TrainingThread | None) -> None:
    stack = '' if thread is None else f':\n{thread.stack()}'
    logger.error('rank %d replaces itself: %s%s', rank, what, stack)


# A thread that is still in an ended wait after this time will never leave; usually it takes 0.25 s.
_OUT_OF_WAITS_S = 5.0
# The same with a GPU, which first computes the kernels already queued, perhaps a thousand.
_OUT_OF_QUEUE_S = 30.0
_PUBLICATIONS_IN_A_TIMEOUT = 10


class Standstill:
    """Checks the training thread of this process, on its looking thread.

    Args:
        rank: of this process.
        timeout_s: limit of a collective.
        stuck_timeout_s: seconds for which the thread may stand still, unless it waits for others,
            before the process ends; 0: forever.

    Attributes:
        thread: the training thread, once all ranks except new processes are set up.
        at_barrier: the thread waits at a barrier for ranks that are all watched.
        unblocked_at: time at which the thread's waits were ended in this round, by
            `time.monotonic`.
        got_on_to: newest committed iteration at the last call of `waits_for_others_s`; None: waits
            before its next call do not count.
    """

    def __init__(self, rank: int, timeout_s: float, stuck_timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._stuck_timeout_s = stuck_timeout_s
        self._progress = _Progress(rank, timeout_s)
        self._setting_up = TrainingThread()
        self.at_barrier = False
        self.unblocked_at: float | None = None
        self.got_on_to: int | None = None
        self.thread: TrainingThread | None = None

    def check(self, store: Store, round_id: int, world_size: int, committed: int) -> None:
        """End this process if its training thread will never leave.

        `committed` is this rank's newest iteration.
        """
        thread = self.thread
        assert thread is not None  # otherwise only the set-up is checked
        if self._progress.publish(store, round_id, committed):
            thread.moved()
        # Read before the probe, which takes milliseconds, as the thread may pass a barrier
        # meanwhile.
        at_barrier, unblocked_at = self.at_barrier, self.unblocked_at
        probe = thread.probe()
        if not probe.waits_for_others:
            limit, still_s = self._stuck_timeout_s, probe.still_s
        elif unblocked_at is not None:
            limit = _OUT_OF_QUEUE_S if thread.on_gpu else _OUT_OF_WAITS_S
            still_s = min(probe.same_place_s, time.monotonic() - unblocked_at)  # a wait may spin
        else:
            if not at_barrier:
                self._end_hang(store, round_id, world_size, probe)
            return
        if limit and still_s > limit:
            what = f'its training thread has stood still for {still_s:.0f} s'
            replace_this_process(store, round_id, self._rank, what, thread)

    def waits_for_others_s(self, committed: int) -> float:
        """Seconds for which the training thread has waited since it committed that iteration.

        Replaces `publish` once the looking thread no longer calls that.
        """
        if self.thread is None:
            return 0.0
        if committed != self.got_on_to:
            self.got_on_to = committed
            self.thread.moved()
        probe = self.thread.probe()
        return probe.same_place_s if probe.waits_for_others else 0.0

    def check_set_up(self, store: Store, round_id: int, joining: bool) -> None:
        """Check the set-up, before `thread` is set.

        Other ranks wait for a joining process that sends heartbeats.
        """
        probe, limit = self._setting_up.probe(), self._stuck_timeout_s
        if joining and 0 < limit < probe.still_s:
            what = f'its set-up has stood still for {probe.still_s:.0f} s'
            replace_this_process(store, round_id, self._rank, what, self._setting_up)

    def _end_hang(self, store: Store, round_id: int, world_size: int, probe: Probe) -> None:
        """End the round if this rank has waited for others for longer than a collective may last.

        A hanging rank cannot leave and is then detected; a single rank that is behind all others is
        replaced at once.
        """
        if probe.same_place_s <= self._timeout_s:
            return
        reason = f'rank {self._rank} has waited for others for {probe.same_place_s:.0f} s'
        behind = _furthest_behind(store, round_id, world_size)
        if behind != NO_RANK:
            reason += f', and rank {behind} is behind all of them'
        end_round(store, round_id, reason, behind)


class _Progress:
    """Publishes this rank's newest committed iteration in the present round.

    Other ranks read it after they have waited for `timeout_s`. Only a rank that is behind can
    commit in that time, so the others need not publish often.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._pause_s = timeout_s / _PUBLICATIONS_IN_A_TIMEOUT
        # Round and newest committed iteration: at the last call of `publish`, and as published.
        self._seen = self._published = (NOWHERE, NOWHERE)
        self._publish_at = 0.0

    def publish(self, store: Store, round_id: int, committed: int) -> bool:
        """Publish the iteration from time to time; True if it has changed since the last call."""
        now = round_id, committed
        got_on, self._seen = now != self._seen, now
        late = self._published[0] != round_id or time.monotonic() > self._publish_at
        if now != self._published and late:
            store.set(_key(round_id, self._rank), str(committed))
            self._published = now
            self._publish_at = time.monotonic() + self._pause_s
        return got_on


def _furthest_behind(store: Store, round_id: int, world_size: int) -> int:
    """The rank that has committed less than all others; `NO_RANK` if there is not exactly one."""
    keys = [_key(round_id, rank) for rank in range(world_size)]
    if not store.check(keys):
        return NO_RANK  # a rank has not trained yet
    committed = [int(found) for found in store.multi_get(keys)]
    least = min(committed)
    return committed.index(least) if committed.count(least) == 1 and world_size > 1 else NO_RANK


def _key(round_id: int, rank: int) -> str:
    return f'progress/{round_id}/{rank}'


class Guard:
    """Detects that the training thread of this process is stuck, if all workers restart together.

    Created by that thread when training begins.

    Args:
        store: a separate connection to the launcher's store.
        rank: of this process.
        hang_timeout_s: seconds after which an unreachable store counts as lost.
        stuck_timeout_s: as of `Standstill`.
    """

    def __init__(
        self, store: Store, rank: int, hang_timeout_s: float, stuck_timeout_s: float
    ) -> None:
        self._rank = rank
        self._stuck_timeout_s = stuck_timeout_s
        self._thread = TrainingThread()
        self._loss = StoreLoss(store, hang_timeout_s)
        self._closed = threading.Event()
        threading.Thread(target=self._run, name='sparse-ckpt-watch', daemon=True).start()

    @property
    def store_lost(self) -> threading.Event:
        """Set while the launcher's store counts as lost."""
        return self._loss.lost

    def lose_device(self, what: str) -> NoReturn:
        """End this process, whose GPU is lost. Any thread."""
        self._end(f'its GPU is lost: {what}', None)

    def close(self) -> None:
        self._closed.set()
        self._loss.close()

    def _run(self) -> None:
        looks, store = self._rank, None
        while not self._closed.wait(LOOK_S):
            looks += 1
            if looks % LOOKS_PER_HEARTBEAT == 0:  # shows that the job lives, and the store
                try:
                    store = store or self._loss.connect()
                    send_heartbeat(store, self._rank)
                except DistError:
                    store = None
            probe = self._thread.probe()
            if not probe.waits_for_others and 0 < self._stuck_timeout_s < probe.still_s:
                what = f'its training thread has stood still for {probe.still_s:.0f} s'
                self._end(what, self._thread)

    def _end(self, what: str, thread: TrainingThread | None) -> NoReturn:
        _log(self._rank, what, thread)
        end_at_once(EXIT_STUCK)
