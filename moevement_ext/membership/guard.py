# SPDX-License-Identifier: Apache-2.0
"""Detects hanging workers in a job whose failures restart all workers.

As in a round of `Membership`, every process sends heartbeats, checks those of the next rank, and
watches its own training thread. But no waiting rank is woken up: it restarts together with the hung
worker.
"""

import threading
from collections.abc import Sequence
from typing import NoReturn

from torch.distributed import Store

from moevement_ext.membership.rendezvous import present_round
from moevement_ext.membership.replacing import replace_this_process
from moevement_ext.membership.round_watch import Connections, RoundWatch
from moevement_ext.membership.store_loss import StoreLoss
from moevement_ext.membership.training_thread import TrainingThread


class Guard:
    """Created by the training thread of each rank when training begins.

    Args:
        store: a separate connection to the launcher's store, in which all ranks have met.
        rank: of this process.
        processes: process numbers by rank.
        hang_timeout_s: as of `RoundWatch`.
        stuck_timeout_s: as of `Standstill`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        processes: Sequence[int],
        hang_timeout_s: float,
        stuck_timeout_s: float,
    ) -> None:
        self._store = store
        self._rank = rank
        self._stuck_timeout_s = stuck_timeout_s
        self._thread = TrainingThread()
        self._loss = StoreLoss(store, hang_timeout_s)
        connections, round = Connections(self._loss.connect), present_round(store)
        self._watch = RoundWatch(
            connections, round, rank, processes, hang_timeout_s, lambda reason: None, self._look
        )
        self._watch.judge()

    @property
    def store_lost(self) -> threading.Event:
        """Set while the launcher's store counts as lost."""
        return self._loss.lost

    def lose_device(self, what: str) -> NoReturn:
        """End this process, whose GPU is lost. Any thread."""
        store, round = self._store.clone(), self._watch.round
        replace_this_process(store, round, self._rank, f'its GPU is lost: {what}', None)

    def close(self) -> None:
        self._watch.stop()
        self._loss.close()

    def _look(self, store: Store) -> None:
        look = self._thread.look()
        if not look.waits_for_others and 0 < self._stuck_timeout_s < look.still_s:
            what = f'its training thread has stood still for {look.still_s:.0f} s'
            replace_this_process(store, self._watch.round, self._rank, what, self._thread)
