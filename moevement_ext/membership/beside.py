# SPDX-License-Identifier: Apache-2.0
"""Rounds that another thread joins while the training thread replays.

A replay depends only on neighbouring stages. When a stage is lost that is no neighbour, all ranks
rendezvous, but the training threads of replaying ranks are not interrupted: a separate thread
submits the report, evaluates the verdict, and interrupts the replay only if it cannot continue.
Otherwise the training thread moves to the new round when its replay is complete.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moevement_ext.membership.rendezvous import RendezvousResult, RoundEnded
from moevement_ext.membership.report import Report


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
