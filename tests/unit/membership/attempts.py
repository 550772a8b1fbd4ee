# SPDX-License-Identifier: Apache-2.0
"""Processes of all ranks of a small job, which rendezvous in one store."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torch.distributed import TCPStore

from moevement_ext.membership.rendezvous import Rendezvous, RendezvousResult, present_round

WORLD = 4
DEADLINE_S = 60.0
"""Timeout of an event that is due at once."""
TIMEOUT = timedelta(seconds=DEADLINE_S)


def connect(launcher: TCPStore) -> TCPStore:
    return TCPStore('127.0.0.1', launcher.port, is_master=False, timeout=TIMEOUT)


def attempts_of(connections: Sequence[TCPStore]) -> list[Rendezvous]:
    """A new process of each rank."""
    return [Rendezvous(store, rank, WORLD) for rank, store in enumerate(connections)]


def report_of(rank: int) -> Callable[[], bytes]:
    return lambda: b'report of %d' % rank


def meet_all(attempts: Sequence[Rendezvous], after: int | None = None) -> list[RendezvousResult]:
    """Start all at the same moment; return the result of each."""
    together = threading.Barrier(len(attempts))

    def attempt(one: Rendezvous) -> RendezvousResult:
        together.wait()
        return one.meet(report_of(one.rank), TIMEOUT, after)

    with ThreadPoolExecutor(len(attempts)) as threads:
        return list(threads.map(attempt, attempts))


def assert_one_new_round(results: Sequence[RendezvousResult]) -> int:
    """All are in the same round, whose store has no key of an earlier round."""
    [round] = {result.round for result in results}
    stores = [result.store for result in results]
    assert not stores[0].check(['mark'])
    stores[0].set('mark', str(round))
    assert {store.get('mark') for store in stores} == {b'%d' % round}
    return round


def die_waiting(launcher: TCPStore, rank: int) -> None:
    """Leave the keys of a worker that was killed while it waited for the others."""
    assert Rendezvous(launcher, rank, WORLD)._join(present_round(launcher), b'dead', False)
