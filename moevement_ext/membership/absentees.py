# SPDX-License-Identifier: Apache-2.0
"""Ranks that neither come to a meeting nor give a sign of life hang; their launcher replaces them.

A rank that is merely late (it ends a write first) goes on sending heartbeats in the epoch that it
comes from, and one that is new and sets up joins on a thread of its own (see `membership`). Who has
joined gives no signs of life while it waits for the last one, but answers when that has come.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
from torch.distributed import DistError, Store

from moevement_ext.membership.eviction import evict
from moevement_ext.membership.rendezvous import (
    Holding,
    absent,
    brought_to,
    heartbeat_key,
    holding_up,
    mend,
)
from moevement_ext.membership.report import Report
from moevement_ext.membership.watch import HEARTBEAT_SECONDS, MOST_BETWEEN_LOOKS_S

logger = logging.getLogger(__name__)


class Absentees:
    """Looks for them from a thread of its own, until stopped, where it is this rank's to do so.

    It also ends the epoch in which ranks meet if whoever began to has died half-way: nobody watches
    that one yet.

    Args:
        connect: opens a connection of its own to the launcher's store, once it is this rank's.
        before: the epoch that everybody comes from.
        pids: process of each rank in it, by rank; none of a process that comes from nowhere, and
            only looks who does not answer.
        world_size: number of ranks.
        hang_timeout_s: seconds without a sign of life after which a rank counts as hung.
        is_ours: whether this rank is one of those that look; asked each time.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        before: int,
        pids: Sequence[int],
        world_size: int,
        hang_timeout_s: float,
        is_ours: Callable[[], bool],
    ) -> None:
        self._connect = connect
        self._before = before
        self._pids = pids
        self._world_size = world_size
        self._hang_timeout_s = hang_timeout_s
        self._is_ours = is_ours
        self._heard: dict[int, tuple[int, float]] = {}
        self._waited_for_s: dict[Holding, float] = {}
        self._stopping = threading.Event()
        threading.Thread(target=self._run, name='sparse-ckpt-absentees', daemon=True).start()

    def stop(self) -> None:
        """All have come."""
        self._stopping.set()

    def _run(self) -> None:
        looked = time.monotonic()
        store: Store | None = None
        try:
            while not self._stopping.wait(2 * HEARTBEAT_SECONDS):
                now = time.monotonic()
                between_s, looked = min(now - looked, MOST_BETWEEN_LOOKS_S), now
                if not self._is_ours():
                    continue
                store = store or self._connect()
                mend(store)
                for rank in absent(store, self._world_size) if self._pids else ():
                    self._listen(store, rank, between_s)
                self._wait_for(store, holding_up(store, self._world_size), between_s)
        except DistError as error:
            logger.warning('absent ranks are no longer looked for: %s', error)

    def _listen(self, store: Store, rank: int, between_s: float) -> None:
        heartbeats = store.add(heartbeat_key(self._before, rank), 0)
        before, silent_s = self._heard.get(rank, (-1, 0.0))
        silent_s = silent_s + between_s if heartbeats == before else 0.0
        if silent_s > self._hang_timeout_s:
            evict(store, rank, self._pids[rank])
            silent_s = 0.0
        self._heard[rank] = heartbeats, silent_s

    def _wait_for(self, store: Store, holding: Sequence[Holding], between_s: float) -> None:
        """Those that have joined, and hold up the others for too long."""
        self._waited_for_s = {one: self._waited_for_s.get(one, 0.0) + between_s for one in holding}
        for one, waited_s in self._waited_for_s.items():
            if waited_s > self._hang_timeout_s:
                brought = brought_to(store, one.epoch, one.rank)
                if brought is not None:
                    evict(store, one.rank, msgspec.msgpack.decode(brought, type=Report).pid)
                self._waited_for_s[one] = 0.0
