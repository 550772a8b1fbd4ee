# SPDX-License-Identifier: Apache-2.0
"""What a process does about its own training thread, or that of another, when it stands still.

One that is stuck by itself, or in a wait that was ended, is never going to leave: its process ends.
A thread that waits for others for longer than a collective may last ends the round: a rank that
still gives heartbeats hangs, or the network does.
"""

import time
from collections.abc import Sequence

from torch.distributed import Store

from moevement_ext.membership.eviction import evict
from moevement_ext.membership.rendezvous import end_round
from moevement_ext.membership.replacing import replace_this_process
from moevement_ext.membership.report import NOWHERE
from moevement_ext.membership.training_thread import Look, TrainingThread

# After which a thread is never going to leave a wait that was ended; it takes a quarter second.
_OUT_OF_WAITS_SECONDS = 5.0
# The same with a GPU, which first computes a thousand kernels that were queued before.
_OUT_OF_QUEUE_SECONDS = 30.0
_PUBLICATIONS_IN_A_TIMEOUT = 10


class Standstill:
    """Looks at the training thread of this process, on its heartbeat thread.

    Args:
        rank: of this process.
        timeout_s: limit of a collective.
        stuck_timeout_s: seconds for which the thread may stand still, unless it waits for others,
            before the process ends; 0: for ever.

    Attributes:
        thread: the training thread, once all but new processes have set up.
        at_barrier: it waits at a barrier for ranks that are all watched.
        unblocked_at: time at which its waits were ended in this round, by `time.monotonic`.
        got_on_to: newest iteration that `waits_for_others_s` knows to be committed; None: any wait
            before its next call does not count.
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

    def look(self, store: Store, round: int, pids: Sequence[int], committed: int) -> None:
        """End this process when its training thread is never going to leave.

        `pids` are the processes of the round, by rank; `committed` is this rank's newest iteration.
        """
        thread = self.thread
        assert thread is not None  # else there is only a set-up to look at
        if self._progress.look(store, round, committed):
            thread.moved()
        # Before the look: it takes milliseconds, in which the thread may pass a barrier.
        at_barrier, unblocked_at = self.at_barrier, self.unblocked_at
        look = thread.look()
        if not look.waits_for_others:
            limit, still_s = self._stuck_timeout_s, look.still_s
        elif unblocked_at is not None:
            limit = _OUT_OF_QUEUE_SECONDS if thread.on_gpu else _OUT_OF_WAITS_SECONDS
            still_s = min(look.same_place_s, time.monotonic() - unblocked_at)  # a wait may spin
        else:
            if not at_barrier:
                self._end_hang(store, round, pids, look)
            return
        if limit and still_s > limit:
            what = f'its training thread has stood still for {still_s:.0f} s'
            replace_this_process(store, round, self._rank, what, thread)

    def waits_for_others_s(self, committed: int) -> float:
        """Seconds for which the training thread has waited since it committed that iteration.

        Instead of `look`, once the heartbeat thread does not look any more.
        """
        if self.thread is None:
            return 0.0
        if committed != self.got_on_to:
            self.got_on_to = committed
            self.thread.moved()
        look = self.thread.look()
        return look.same_place_s if look.waits_for_others else 0.0

    def look_at_set_up(self, store: Store, round: int, joining: bool) -> None:
        """Before `thread` is set: others wait for a joining process while it sends heartbeats."""
        look, limit = self._setting_up.look(), self._stuck_timeout_s
        if joining and 0 < limit < look.still_s:
            what = f'its set-up has stood still for {look.still_s:.0f} s'
            replace_this_process(store, round, self._rank, what, self._setting_up)

    def _end_hang(self, store: Store, round: int, pids: Sequence[int], look: Look) -> None:
        """End the round if this rank has waited for others for longer than a collective may last.

        A rank that hangs cannot leave, which shows; one that alone is behind is replaced at once.
        """
        if look.same_place_s <= self._timeout_s:
            return
        reason = f'rank {self._rank} has waited for others for {look.same_place_s:.0f} s'
        behind = _furthest_behind(store, round, len(pids))
        if behind is not None:
            evict(store, behind, pids[behind])
            reason += f', and rank {behind} is behind all of them'
        end_round(store, round, reason)


class _Progress:
    """Publishes what this rank has committed in the present round.

    Others ask after a wait of `timeout_s`: then only the rank that is behind gets on.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._pause_s = timeout_s / _PUBLICATIONS_IN_A_TIMEOUT
        # Round and newest committed iteration: as last looked at, and as others know.
        self._seen = self._published = (NOWHERE, NOWHERE)
        self._publish_at = 0.0

    def look(self, store: Store, round: int, committed: int) -> bool:
        """Publish it every now and then; true if it has changed since the last look."""
        now = round, committed
        got_on, self._seen = now != self._seen, now
        late = self._published[0] != round or time.monotonic() > self._publish_at
        if now != self._published and late:
            store.set(_key(round, self._rank), str(committed))
            self._published = now
            self._publish_at = time.monotonic() + self._pause_s
        return got_on


def _furthest_behind(store: Store, round: int, world_size: int) -> int | None:
    """The rank that has committed less than all others; None if there is not exactly one."""
    keys = [_key(round, rank) for rank in range(world_size)]
    if not store.check(keys):
        return None  # a rank has not trained yet
    committed = [int(found) for found in store.multi_get(keys)]
    least = min(committed)
    return committed.index(least) if committed.count(least) == 1 and world_size > 1 else None


def _key(round: int, rank: int) -> str:
    return f'progress/{round}/{rank}'
