# SPDX-License-Identifier: Apache-2.0
"""A rank that neither joins a rendezvous nor sends heartbeats hangs; its launcher replaces it.

A rank that is merely late (it completes a write first) still sends heartbeats in its previous
round, and a new process joins on a separate thread during its set-up (see `membership`). A rank
that has joined sends no heartbeats while it waits for the last rank, but answers once that rank has
joined.
"""

import threading
import time
from collections.abc import Callable

import msgspec
from torch.distributed import Store

from moevement_ext.logger import logger_of
from moevement_ext.membership.deadline import Absent
from moevement_ext.membership.eviction import evict
from moevement_ext.membership.heartbeats import hear
from moevement_ext.membership.rendezvous import (
    UNKNOWN,
    absent,
    brought_to,
    end_round,
    holding_up,
    repair,
)
from moevement_ext.membership.report import Report
from moevement_ext.membership.round_watch import (
    HEARTBEAT_SECONDS,
    MOST_BETWEEN_LOOKS_S,
    heartbeat_period_s,
)

logger = logger_of(__name__)


_REPORT = msgspec.msgpack.Decoder(Report)


class MissingRanks:
    """Background thread that detects missing ranks; active only on elected ranks.

    It checks as often as heartbeats are sent. More often, it checks whether a process died while it
    ended the round in which ranks meet, and then completes the end: no other thread watches that
    round yet. A new process checks as well, as it may be the only one that can. `connect` opens a
    separate connection to the store. `is_ours`, called each time, is true if this rank is elected.
    A rank without a heartbeat for `hang_timeout_s` seconds counts as hung.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        world_size: int,
        hang_timeout_s: float,
        is_ours: Callable[[], bool],
    ) -> None:
        self._connect = connect
        self._world_size = world_size
        self._hang_timeout_s = hang_timeout_s
        self._between_looks_s = heartbeat_period_s(hang_timeout_s)
        self._is_ours = is_ours
        self._heard: dict[Absent, int] = {}
        self._silent_s: dict[Absent, float] = {}
        self._stopping = threading.Event()
        threading.Thread(target=self._run, name='sparse-ckpt-missing-ranks', daemon=True).start()

    def close(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        woke = time.monotonic()
        since_look_s = 0.0
        store: Store | None = None
        lost = False
        while not self._stopping.wait(2 * HEARTBEAT_SECONDS):
            now = time.monotonic()
            since_look_s += min(now - woke, MOST_BETWEEN_LOOKS_S)
            woke = now
            if not self._is_ours():
                continue
            try:
                store = store or self._connect()
                repair(store)
                if since_look_s >= self._between_looks_s:
                    self._look(store, since_look_s)
                    since_look_s = 0.0
            except Exception as error:  # tried again, on another connection
                store = None
                if not (lost or self._stopping.is_set()):
                    logger.warning('missing ranks are not detected at present: %s', error)
                lost = True

    def _look(self, store: Store, between_s: float) -> None:
        silent = [
            one for one in absent(store, self._world_size) if not self._gives_a_sign(store, one)
        ]
        silent += holding_up(store, self._world_size)
        self._silent_s = {one: self._silent_s.get(one, 0.0) + between_s for one in silent}
        for one, silent_s in self._silent_s.items():
            if silent_s > self._hang_timeout_s:
                self._evict(store, one)
                self._silent_s[one] = 0.0

    def _gives_a_sign(self, store: Store, one: Absent) -> bool:
        heard = hear(store, one.round, one.rank)
        before, self._heard[one] = self._heard.get(one, -1), heard
        return heard != before

    def _evict(self, store: Store, one: Absent) -> None:
        """Evict the process that took part in that round, if its launcher still runs it."""
        if one.rank == UNKNOWN:  # evicted once it does not join the next round
            end_round(store, one.round, 'the rank that was to pack the reports has stopped')
            return
        brought = brought_to(store, one.round, one.rank)
        if brought is not None:
            report = _REPORT.decode(brought)
            evict(store, one.rank, report.process, report.launch)
