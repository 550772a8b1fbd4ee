# SPDX-License-Identifier: Apache-2.0
"""Watches the epoch on a thread of its own, so that no rank waits for a dead one.

Three ways to notice a failure, one verdict (the epoch is broken, see `rendezvous`): somebody who
lost a connection, or the launcher, breaks the epoch; a rank that does not beat for a while is
reported by the rank before it, since a stopped process breaks nothing by itself.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import DistError, Store

from moevement_ext.rendezvous import break_epoch, why_broken

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
_LONG = timedelta(days=365)


class EpochWatch:
    """Watches one epoch until it is broken or `stop` is called.

    It gives signs of life at once; those of the next rank are missed only after `judge`.

    Args:
        stores: two connections of its own to the launcher's store, one for each thread.
        epoch: the one this process takes part in.
        rank: of this process.
        pids: process of each rank, by rank, to tell the launcher which one hangs.
        hang_timeout_s: seconds without a beat after which a rank counts as hung.
        on_broken: called once, on the watching thread, with the reason: wake up whoever waits.
    """

    def __init__(
        self,
        stores: tuple[Store, Store],
        epoch: int,
        rank: int,
        pids: Sequence[int],
        hang_timeout_s: float,
        on_broken: Callable[[str], None],
    ) -> None:
        self.epoch = epoch
        self.broken = threading.Event()
        self.reason: str | None = None
        self._rank = rank
        self._pids = pids
        self._watched = (rank + 1) % len(pids)
        self._hang_timeout_s = hang_timeout_s
        self._on_broken = on_broken
        self._stopping = threading.Event()
        self._judging = threading.Event()
        watching, beating = stores
        self._waiter = self._start(self._wait, watching)
        self._beater = self._start(self._beat_until_over, beating)

    def judge(self) -> None:
        """Have the next rank count as hung when it is not heard of for too long from now on."""
        self._judging.set()

    def stop(self) -> None:
        """What happens to the epoch is no longer noticed. The waiting thread ends with it."""
        self._stopping.set()
        self._beater.join()
        if self.broken.is_set():  # it may still be waking others up
            self._waiter.join()

    def _start(self, body: Callable[[Store], None], store: Store) -> threading.Thread:
        thread = threading.Thread(target=body, args=(store,), name='sparse-ckpt-watch', daemon=True)
        thread.start()
        return thread

    def _wait(self, store: Store) -> None:
        """The store wakes this thread up when the epoch is broken; nobody polls."""
        try:
            store.wait([f'broken/{self.epoch}'], _LONG)
            reason = why_broken(store, self.epoch) or 'unknown'
            break_epoch(store, self.epoch, reason)  # whoever announced it may have died half-way
        except DistError as error:
            if not self._stopping.is_set():
                logger.warning('the store of the launcher is gone: %s', error)
            return
        if not self._stopping.is_set():
            self.reason = reason
            self.broken.set()
            self._on_broken(reason)

    def _beat_until_over(self, store: Store) -> None:
        beats, seen, since = 0, 0, time.monotonic()
        while not (self._stopping.wait(BEAT_SECONDS) or self.broken.is_set()):
            try:
                beats += 1
                store.set(self._key(self._rank), str(beats))
                heard = self._heard(store)
                if heard != seen or not self._judging.is_set():
                    seen, since = heard, time.monotonic()
                elif time.monotonic() - since > self._hang_timeout_s:
                    self._evict(store)
                    return
            except DistError:
                return  # the other thread says so

    def _heard(self, store: Store) -> int:
        """Beats so far of the rank this one watches."""
        key = self._key(self._watched)
        return int(store.get(key)) if store.check([key]) else 0

    def _evict(self, store: Store) -> None:
        """Report a hung rank; its launcher kills it, so that it is started again."""
        store.set(f'evict/{self._watched}', str(self._pids[self._watched]))
        reason = f'rank {self._watched} has not been heard of for {self._hang_timeout_s:g} s'
        break_epoch(store, self.epoch, reason)

    def _key(self, rank: int) -> str:
        return f'beat/{self.epoch}/{rank}'
