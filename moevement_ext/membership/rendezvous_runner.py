# SPDX-License-Identifier: Apache-2.0
"""Joins rounds, and reconnects to the store if the connection is lost.

A rank that is merely late (it completes a write first) still sends heartbeats, and a new process
joins on a separate thread during its set-up (see `membership`).

A replay depends only on neighbouring stages. When a stage is lost that is no neighbour, all ranks
rendezvous, but the training threads of replaying ranks are not interrupted: a separate thread
submits the report, evaluates the verdict, and interrupts the replay only if it cannot continue
(see `Beside`). Otherwise the training thread moves to the new round when its replay is complete.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import msgspec
from torch.distributed import DistError, Store

from moevement_ext.logger import logger_of
from moevement_ext.membership import exchange
from moevement_ext.membership.counters import place_in
from moevement_ext.membership.mailbox import own_launch
from moevement_ext.membership.rendezvous import (
    Rendezvous,
    RendezvousResult,
    RoundEnded,
    end_round,
    present_round,
)
from moevement_ext.membership.report import Report, decode_all, encode
from moevement_ext.membership.store_loss import StoreLoss
from moevement_ext.store_answers import peek

logger = logger_of(__name__)

_REPORT = msgspec.msgpack.Decoder(Report)


@dataclass(eq=False)
class RendezvousRunner:
    """Runs the rendezvous of one process. `loss` connects to the store. One thread at a time."""

    _rendezvous: Rendezvous
    _loss: StoreLoss
    _timeout: timedelta

    def meet(self, report: Callable[[], Report], after: int | None) -> RendezvousResult:
        """Join the round after `after`; None: any round.

        Ends the round if the connection is lost: this process cannot know whether it was counted.
        """
        while True:
            try:
                return self._rendezvous.meet(lambda: encode(report()), self._timeout, after)
            except DistError as error:
                logger.warning('the ranks start a new rendezvous: %s', error)
            self.reconnect()
            joined = self._rendezvous.newest_joined
            after = after if joined is None else joined

    def meet_first(self, brought: Report) -> RendezvousResult:
        """Join any round.

        Join again if no survivor is left, and some processes were set up to join a running job:
        these processes end now.
        """
        while True:
            result = self.meet(lambda: brought, None)
            reports = decode_all(result.reports)
            survived = any(report.survivor for report in reports)
            if survived or not any(report.midway for report in reports):
                return result
            end_round(self._rendezvous.store, result.round, 'no rank with state is left to join')

    def reconnect(self) -> Store:
        """Open another connection for all further rounds, or raise `StoreLost`."""
        store = self._rendezvous.store = self._loss.reconnect()
        store.set_timeout(self._timeout)
        return store


_MOST_ASKED = 4


def waiting_survivor(rendezvous: Rendezvous) -> Report | None:
    """A survivor's report in the present round; None if no sampled survivor has joined yet.

    The `rendezvous` of this process has not joined that round.
    """
    store, rank, world_size = rendezvous.store, rendezvous.rank, rendezvous.world_size
    round_id = present_round(store)
    if round_id == 0:
        return None  # the job begins
    for other in _asked(rank, world_size):
        place = place_in(round_id, other)
        if store.check([place]):  # `peek` would wake up ranks that wait for the key
            found = peek(store, place)
            if found is not None:
                report = _REPORT.decode(exchange.unpacked(found))
                # A store outside may keep a report of a launch that is gone.
                if report.survivor and report.details and report.launch == own_launch():
                    return report
    return None


def _asked(rank: int, world_size: int) -> Iterator[int]:
    """A few other ranks, far apart, as ranks of a node are lost together."""
    step = max(world_size // _MOST_ASKED, 1)
    for away in range(step, world_size, step):
        yield (rank + away) % world_size


class Met(NamedTuple):
    """A round that the separate thread has joined."""

    reason: str
    """Why the previous round ended."""
    detect_s: float
    """Seconds from the end of the previous round until this process detected it."""
    before: list[Report]
    """Reports of all ranks in the previous round, by rank."""
    result: RendezvousResult
    reports: list[Report]
    """Reports of all ranks in this round, by rank."""


class Beside:
    """Callbacks of one replay for the separate thread, and the rounds that this thread has joined.

    `report` returns this rank's report; `goes_on` takes the reports of all ranks, and returns
    whether the replay continues.
    """

    def __init__(
        self, report: Callable[[], Report], goes_on: Callable[[Sequence[Report]], bool]
    ) -> None:
        self.report = report
        self.goes_on = goes_on
        self._met: list[Met] = []
        self._ended = False
        self._changed = threading.Condition()

    def add(self, met: Met) -> None:
        """Record a round in which the replay continues."""
        with self._changed:
            self._met.append(met)
            self._changed.notify_all()

    def end(self) -> None:
        """Record that the separate thread joins no further round."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self, wait: bool) -> list[Met]:
        """The rounds joined since the last call, oldest first; with `wait`, wait for at least one.

        Raises `RoundEnded` after `end`.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._met or self._ended)
            if self._ended:
                raise RoundEnded('the replay of this stage cannot go on')
            met, self._met = self._met, []
            return met

    @property
    def has_met(self) -> bool:
        with self._changed:
            return bool(self._met)
