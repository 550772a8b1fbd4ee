# SPDX-License-Identifier: Apache-2.0
"""This process among all ranks of the job: the present epoch, how it ends, and the next one."""

import os
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta

import msgspec
from torch.distributed import DistError, PrefixStore, Store

from moevement_ext.config import node_name
from moevement_ext.detect.watch import EpochWatch
from moevement_ext.host_memory import held_windows
from moevement_ext.memory.ledger import Ledger
from moevement_ext.memory.store import NodeStore
from moevement_ext.recover.arriving import ArrivalStopped
from moevement_ext.recover.verdict import NOWHERE, Report
from moevement_ext.regroup.interruptible_store import InterruptibleStore
from moevement_ext.regroup.process_groups import ProcessGroups, RegroupError
from moevement_ext.rendezvous import (
    EpochBroken,
    Meeting,
    Rendezvous,
    absent,
    break_epoch,
    broken_since,
)
from moevement_ext.replicate.log_reader import ReaderClosed

_UPDATE_GRACE_SECONDS = 1.0
_CONNECT_TIMEOUT = timedelta(seconds=60)
"""For all ranks to connect when all have said that they are about to."""


class Membership:
    """Meets the other ranks. Construction waits for all of them.

    Args:
        store: the launcher's store, which outlives the workers.
        rank: of this process.
        world_size: number of ranks.
        timeout: how long to wait for others.
        hang_timeout_s: seconds without a sign of life after which a rank counts as hung.
        report: what this process brings to the first meeting.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        hang_timeout_s: float,
        report: Callable[[], Report],
    ) -> None:
        self._store = store
        self._timeout = timeout
        self._hang_timeout_s = hang_timeout_s
        self._watch_stores = store.clone(), store.clone()
        self._groups: ProcessGroups | None = None
        self._wake: Callable[[], None] = lambda: None
        self._in_use: list[Store] = []
        self.reason = ''
        self.detect_s = 0.0
        self.not_updating = threading.Event()
        """Clear while the optimizer writes: an update that all its ranks can finish is let to."""
        self.not_updating.set()
        self._rendezvous = Rendezvous(store, rank, world_size)
        self._rendezvous.predecessor_took_part()
        self._arrive(self._rendezvous.meet(_encoded(report), timeout))
        self.origin = max(
            [report.origin for report in self.reports if report.survivor] or [NOWHERE]
        )
        self.joining = self.origin != NOWHERE
        if not self.joining:
            self.origin = self._meeting.epoch

    @property
    def store(self) -> Store:
        """For keys of the present epoch."""
        return self._meeting.store

    @property
    def archive(self) -> Store:
        """For keys of this life of the job, from the start of all its ranks to the next such."""
        return PrefixStore(f'job/{self.origin}', self._store.clone())

    @property
    def broken(self) -> bool:
        """A failure was announced in the present epoch."""
        return self._watch.broken.is_set()

    def watch(self, distributed_backend: str, wake: Callable[[], None]) -> None:
        """Have waits of this process end when an epoch does, and report the next rank if it hangs.

        Called when process groups exist: by then all have set up, but for new processes.

        Args:
            distributed_backend: upstream's `--distributed-backend`.
            wake: called on the watching thread besides: ends waits that are not torch's.
        """
        self._wake = wake
        self._watch.judge()
        if self._groups is None:
            self._groups = ProcessGroups(distributed_backend)
        if self.broken:
            self._unblock()

    def leave(self, reason: str) -> None:
        """Announce a failure in the present epoch, unless somebody has, and unblock this process.

        `reason` and `detect_s` then say why the epoch ended and how long before this call that was
        announced: by the launcher, which saw a worker die, or by another rank.
        """
        break_epoch(self._store, self._meeting.epoch, reason)
        announced = broken_since(self._store, self._meeting.epoch) or time.time()
        self.detect_s = max(time.time() - announced, 0.0)  # the clock of another node may be ahead
        self._watch.broken.wait(self._timeout.total_seconds())
        self._watch.stop()
        self.reason = self._watch.reason or reason

    def meet(self, report: Callable[[], Report]) -> list[Report]:
        """Join the epoch after the present one; returns what all ranks report, by rank.

        Raises:
            FencedOut: this process has been replaced.
            SparseCheckpointError: somebody did not come in time.
        """
        before = self._meeting.epoch
        patience = threading.Timer(self._hang_timeout_s, self._evict_absent, [self._store.clone()])
        patience.start()
        try:
            self._arrive(self._rendezvous.meet(_encoded(report), self._timeout, after=before))
        finally:
            patience.cancel()
        return self.reports

    def _evict_absent(self, store: Store) -> None:
        """Have ranks killed that neither came nor were replaced: they hang, too."""
        for rank in absent(store, self._rendezvous.world_size):
            store.set(f'evict/{rank}', str(self.reports[rank].pid))

    def barrier(self, name: str) -> None:
        """Wait for all ranks of the epoch.

        Raises:
            EpochBroken: a failure was announced meanwhile.
        """
        self._rendezvous.barrier(self._meeting, name, self._timeout)

    def renew(self, members: Collection[int] | None) -> None:
        """Connect the process groups of `members` (None: all) anew, silence the others.

        Raises:
            EpochBroken: a failure was announced meanwhile.
        """
        assert self._groups is not None
        self._raise_if_broken()
        name = 'all' if members is None else 'some'
        timeout = min(self._timeout, _CONNECT_TIMEOUT)
        store: Store = PrefixStore(f'groups/{name}', self.store)
        store = InterruptibleStore(store, self._watch.broken, timeout)
        self._in_use = [*self._in_use[-1:], store]  # the groups clean up in the one before
        try:
            self._groups.renew(store, members, timeout)
        finally:
            if self.broken:
                self._groups.unblock()
        self._raise_if_broken()

    def silence(self) -> None:
        """Let all collectives complete at once, without effect, until groups are connected."""
        if self._groups is not None:  # those of a new process are silent from the start
            self._groups.renew(self.store, (), self._timeout)

    def close(self) -> None:
        """The job is over."""
        self._watch.stop()

    def _raise_if_broken(self) -> None:
        if self.broken:
            raise EpochBroken(self._watch.reason or 'unknown')

    def _arrive(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self.reports = [msgspec.msgpack.decode(item, type=Report) for item in meeting.reports]
        # Signs of life from now on: the set-up of a new process may take long.
        self._watch = EpochWatch(
            self._watch_stores,
            meeting.epoch,
            self._rendezvous.rank,
            [report.pid for report in self.reports],
            self._hang_timeout_s,
            self._on_broken,
        )

    def _on_broken(self, reason: str) -> None:
        """On the watching thread."""
        self.not_updating.wait(_UPDATE_GRACE_SECONDS)
        self._unblock()

    def _unblock(self) -> None:
        if self._groups is not None:
            self._groups.unblock()
        self._wake()


def newcomer_report(store: NodeStore, run: str, topology: str, rank: int) -> Report:
    """What a new process has: what its node's memory kept."""
    newest = Ledger.read_newest(store.ledger_path(rank))
    return Report(
        survivor=False,
        node=node_name(),
        pid=os.getpid(),
        windows=held_windows(store, run, topology),
        committed=newest.iteration if newest is not None else NOWHERE,
    )


def _encoded(report: Callable[[], Report]) -> Callable[[], bytes]:
    return lambda: msgspec.msgpack.encode(report())


def lost_peer(error: BaseException) -> bool:
    """True if an exception says that another rank is gone, not that this one is at fault.

    gloo names its transport in every message; NCCL, the stores, and what windows and logs are
    fetched by have types of their own.
    """
    known = EpochBroken | RegroupError | DistError | ConnectionError | ReaderClosed | ArrivalStopped
    if isinstance(error, known):
        return True
    return isinstance(error, RuntimeError) and 'gloo' in str(error).lower()
