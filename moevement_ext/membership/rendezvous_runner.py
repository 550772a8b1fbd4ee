# SPDX-License-Identifier: Apache-2.0
"""Meets the others in the next round, over another connection if that to the store is lost."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistError, Store

from moevement_ext.membership.missing_ranks import MissingRanks
from moevement_ext.membership.rendezvous import Rendezvous, RendezvousResult
from moevement_ext.membership.report import Report, encode
from moevement_ext.membership.store_loss import StoreLoss

logger = logging.getLogger(__name__)


class RendezvousRunner:
    """The rendezvous of one process; used by one thread at a time.

    Args:
        rendezvous: where it meets the others.
        loss: connects it to the store.
        timeout: how long to wait for others.
        hang_timeout_s: seconds without a heartbeat after which a rank counts as hung.
    """

    def __init__(
        self, rendezvous: Rendezvous, loss: StoreLoss, timeout: timedelta, hang_timeout_s: float
    ) -> None:
        self._rendezvous = rendezvous
        self._loss = loss
        self._timeout = timeout
        self._hang_timeout_s = hang_timeout_s

    def meet(self, report: Callable[[], Report], after: int | None) -> RendezvousResult:
        """Join the round after one, or any.

        A round in which the connection is lost is over then: whether this rank has been counted
        in it cannot be known.
        """
        while True:
            try:
                with self._looking_for_others():
                    return self._rendezvous.meet(lambda: encode(report()), self._timeout, after)
            except DistError as error:
                logger.warning('sparse checkpointing: the ranks meet anew: %s', error)
            self.reconnect()
            joined = self._rendezvous.newest_joined
            after = after if joined is None else joined

    def reconnect(self) -> Store:
        """Another connection, by which the others are met from now on.

        Raises:
            StoreLost: there is none any more.
        """
        store = self._rendezvous.store = self._loss.reconnect()
        store.set_timeout(self._timeout)
        return store

    @contextmanager
    def _looking_for_others(self) -> Iterator[None]:
        missing_ranks = MissingRanks(
            self._loss.connect,
            self._rendezvous.world_size,
            self._hang_timeout_s,
            lambda: self._rendezvous.looks_for_others,
        )
        try:
            yield
        finally:
            missing_ranks.stop()
