# SPDX-License-Identifier: Apache-2.0
"""Joins rounds; reconnects to the store if the connection is lost."""

from collections.abc import Callable
from contextlib import closing
from datetime import timedelta

from torch.distributed import DistError, Store

from moevement_ext.logger import logger_of
from moevement_ext.membership.missing_ranks import MissingRanks
from moevement_ext.membership.rendezvous import Rendezvous, RendezvousResult, end_round
from moevement_ext.membership.report import Report, decode_all, encode
from moevement_ext.membership.store_loss import StoreLoss

logger = logger_of(__name__)


class RendezvousRunner:
    """Runs the rendezvous of one process. `loss` connects to the store. One thread at a time."""

    def __init__(
        self, rendezvous: Rendezvous, loss: StoreLoss, timeout: timedelta, hang_timeout_s: float
    ) -> None:
        self._rendezvous = rendezvous
        self._loss = loss
        self._timeout = timeout
        self._hang_timeout_s = hang_timeout_s

    def meet(self, report: Callable[[], Report], after: int | None) -> RendezvousResult:
        """Join the round after `after`; None: any round.

        Ends the round if the connection is lost: this process cannot know whether it was counted.
        """
        while True:
            try:
                with closing(self._missing_ranks()):
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

    def _missing_ranks(self) -> MissingRanks:
        return MissingRanks(
            self._loss.connect,
            self._rendezvous.world_size,
            self._hang_timeout_s,
            lambda: self._rendezvous.looks_for_others,
        )
