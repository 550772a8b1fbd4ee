# SPDX-License-Identifier: Apache-2.0
"""What a process does about its own training thread, or that of another, when it stands still.

One that is stuck by itself, or in a wait that was ended, is never going to leave: its process ends.
A thread that waits for others for longer than a collective may last ends the round: a rank that
still gives heartbeats hangs, or the network does.
"""

import time
from typing import NamedTuple

from torch.distributed import Store

from moevement_ext.membership import progress
from moevement_ext.membership.eviction import evict
from moevement_ext.membership.progress import Progress
from moevement_ext.membership.rendezvous import end_round
from moevement_ext.membership.replacing import replace_this_process
from moevement_ext.membership.training_thread import Look, TrainingThread

# After which a thread is never going to leave a wait that was ended; it takes a quarter second.
_OUT_OF_WAITS_SECONDS = 5.0
# The same with a GPU, which first computes a thousand kernels that were queued before.
_OUT_OF_QUEUE_SECONDS = 30.0


class Present(NamedTuple):
    """Where the process is."""

    round: int
    pids: list[int]
    """By rank."""
    joining: bool
    committed: int
    at_barrier: bool
    unblocked_at: float | None
    """When the waits of the training thread were ended."""


class Standstill:
    """Looks at the training thread of this process, on its heartbeat thread.

    Args:
        rank: of this process.
        timeout_s: of a collective.
        stuck_timeout_s: for which the thread may stand still, unless it waits for others; 0: for
            ever.

    Attributes:
        thread: the training thread, once all but new processes have set up.
        got_on_to: newest iteration that `waits_for_others_s` knows to be committed; None: any wait
            before its next call does not count.
    """

    def __init__(self, rank: int, timeout_s: float, stuck_timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._stuck_timeout_s = stuck_timeout_s
        self._progress = Progress(rank, timeout_s)
        self._setting_up = TrainingThread()
        self.got_on_to: int | None = None
        self.thread: TrainingThread | None = None

    def look(self, store: Store, present: Present) -> None:
        """End this process when its training thread is never going to leave."""
        thread = self.thread
        if thread is None:
            self._look_at_set_up(store, present)
            return
        if self._progress.look(store, present.round, present.committed):
            thread.moved()
        look, unblocked_at = thread.look(), present.unblocked_at
        if not look.waits_for_others:
            limit, still_s = self._stuck_timeout_s, look.still_s
        elif unblocked_at is not None:
            limit = _OUT_OF_QUEUE_SECONDS if thread.on_gpu else _OUT_OF_WAITS_SECONDS
            still_s = min(look.same_place_s, time.monotonic() - unblocked_at)  # a wait may spin
        else:
            if not present.at_barrier:  # else all are watched that it waits for
                self._end_hang(store, present, look)
            return
        if limit and still_s > limit:
            what = f'its training thread has stood still for {still_s:.0f} s'
            replace_this_process(store, present.round, self._rank, what, thread)

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

    def _look_at_set_up(self, store: Store, present: Present) -> None:
        """The others wait for one that joins as long as it gives heartbeats."""
        look, limit = self._setting_up.look(), self._stuck_timeout_s
        if present.joining and 0 < limit < look.still_s:
            what = f'its set-up has stood still for {look.still_s:.0f} s'
            replace_this_process(store, present.round, self._rank, what, self._setting_up)

    def _end_hang(self, store: Store, present: Present, look: Look) -> None:
        """End the round if this rank has waited for others for longer than a collective may last.

        A rank that hangs cannot leave, which shows; one that alone is behind is replaced at once.
        """
        if look.same_place_s <= self._timeout_s:
            return
        reason = f'rank {self._rank} has waited for others for {look.same_place_s:.0f} s'
        behind = progress.furthest_behind(store, present.round, len(present.pids))
        if behind is not None:
            evict(store, behind, present.pids[behind])
            reason += f', and rank {behind} is behind all of them'
        end_round(store, present.round, reason)
