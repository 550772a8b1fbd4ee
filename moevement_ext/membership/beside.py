# SPDX-License-Identifier: Apache-2.0
"""Rounds that a thread of its own joins while the training thread replays.

A replay needs nothing of stages that are not its neighbours. When such a stage is lost, all ranks
meet as ever, but for those that replay the training thread is not told: another thread brings their
report, hears what follows, and interrupts the replay only if it cannot go on. Else the training
thread takes over what was met beside it once it is through.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moevement_ext.membership.rendezvous import RendezvousResult, RoundEnded
from moevement_ext.membership.report import Report


class Met(NamedTuple):
    """A round that was joined beside the training thread."""

    reason: str
    """Why the one before was over."""
    detect_s: float
    """From its end until this process heard of it."""
    before: list[Report]
    """Reports of all ranks, by rank, in that one."""
    result: RendezvousResult
    reports: list[Report]
    """In this one."""


class Beside:
    """What one replay leaves to another thread, which calls `report` and `goes_on`.

    `report` returns what this rank brings; `goes_on` gets what all ranks brought, and returns
    whether the replay goes on.
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
        """The replay goes on in this round."""
        with self._changed:
            self._met.append(met)
            self._changed.notify_all()

    def end(self) -> None:
        """No further round is joined beside the training thread."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self, wait: bool) -> list[Met]:
        """What was met since the last call, oldest first; with `wait`, wait until there is any.

        Raises `RoundEnded` if no further round is joined beside the training thread.
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
