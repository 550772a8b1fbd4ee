# SPDX-License-Identifier: Apache-2.0
"""Rendezvous of all ranks, at the start and after every failure, in a store that outlives them.

A *round* is a set of processes, one per rank, that met under a new number; process groups are
connected under its name. A round is ended by a rank that lost a peer, the launcher that saw a
worker die, a rank that hears of a death from the coordinator, or a new process that finds its
predecessor in the round. An ended round states that a failure happened: each rank joins the next
round with a report, or is gone.

Keys: see "Keys of the store" in `docs/design.md`.

Three steps end a round, in this order: give the reason, close the barriers, raise the number. So a
rank that reads the new number can rely on closed barriers.
"""

import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.logger import logger_of
from moevement_ext.membership import counters, exchange
from moevement_ext.membership.counters import (
    Deadline,
    close_barrier,
    count_heartbeats,
    has_moved,
    is_open,
    open_barrier,
    place_in,
)
from moevement_ext.store_answers import peek

logger = logger_of(__name__)

BARRIERS = ('ready', 'replayed', 'trained', 'ended', 'left', 'over')
"""All names of barriers; each is used once in a round."""
NO_RANK = -1
"""Stands for no rank."""
# Deleting keys earlier would delay a recovery, in which a large job sends many requests.
_END_OF_A_RECOVERY = 'replayed'
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.002, 0.064
_FINISH_S = 5.0
_REPLACED = 'rank {} was replaced by another process; this one ends (a --node-rank given twice?)'
_OF_A_ROUND = re.compile(r'(?:broken|join|here|met|progress|round)/(\d+)(?:/.*)?')
_OF_AN_ATTEMPT = re.compile(r'job/[0-9a-f]+/(\d+)/.*')


class RoundEnded(SparseCheckpointError):
    """A failure was announced; all ranks move on to the next round."""


class FencedOut(SparseCheckpointError):
    """Another process has replaced this one while it was stopped; this process must end."""


class RendezvousResult(NamedTuple):
    """Result of a rendezvous of all ranks."""

    round: int
    store: Store
    """Store for keys of this round only."""
    reports: list[bytes]
    """Encoded reports, by rank."""
    connection: Store
    """The connection to the launcher's store that this process used in the rendezvous."""


def launcher_store(timeout: timedelta) -> Store | None:
    """Connect to the launcher's store, announced as torchrun does; None if there is none."""
    if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True':
        return None
    host, port = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
    return TCPStore(host, port, is_master=False, timeout=timeout)


def present_round(store: Store) -> int:
    """Number of the round that ranks can join, or in which the job runs."""
    return store.add('round', 0)


def end_round(store: Store, round_id: int, reason: str, hangs: int = NO_RANK) -> bool:
    """End `round_id`; True if this call was the first.

    The process of the rank `hangs` ends itself. If this process is killed, another one completes
    it.
    """
    if is_over(store, round_id):
        return False
    announced = f'{time.time():.6f} {hangs} {reason or "unknown"}'
    if store.compare_set(f'broken/{round_id}', '', announced) == announced.encode():
        _finish_breaking(store, round_id)
        return True
    complete_end(store, round_id)
    return False


def _finish_breaking(store: Store, round_id: int) -> None:
    of_all = (_barrier_key(round_id, name) for name in BARRIERS)
    for barrier in (f'met/{round_id}', *of_all):
        close_barrier(store, barrier)
    store.compare_set('round', str(round_id), str(round_id + 1))


def complete_end(store: Store, round_id: int) -> None:
    """Wait until another process has ended a round, and complete the end if that process does not.

    All ranks see the first of the three steps; only one rank should take the other two.
    """
    pause_s = _FIRST_PAUSE_S
    while not is_over(store, round_id):
        if pause_s > _LAST_PAUSE_S:  # the process that began has died half-way
            _finish_breaking(store, round_id)
            return
        time.sleep(pause_s)
        pause_s *= 2


def repair(store: Store) -> None:
    """Complete the end of the present round if the process that began it has died."""
    round_id = present_round(store)
    if is_broken(store, round_id):
        complete_end(store, round_id)


def announce_failure(store: Store, rank: int, reason: str) -> None:
    """End the round of a dead worker; called by the launcher.

    Does nothing if the other ranks have already moved on without it.
    """
    round_id = present_round(store)
    if counters.has_signed(store, f'here/{round_id}', rank):
        end_round(store, round_id, reason)


class Ending(NamedTuple):
    """How a round ended."""

    since: float
    """Time of the announcement: seconds since the epoch, by the announcing process's clock."""
    reason: str
    hangs: int = NO_RANK
    """A rank that the others have waited for too long."""


def is_broken(store: Store, round_id: int) -> bool:
    """True once a process has begun to end the round; safe to call during the round."""
    return store.check([f'broken/{round_id}'])


def how_broken(store: Store, round_id: int, reason: str = 'unknown') -> Ending:
    """How a round ended. Call this only for a round that is over: see `peek`.

    `reason` stands for that of a round that ended so long ago that its keys are deleted.
    """
    found = peek(store, f'broken/{round_id}')
    if found is None:
        return Ending(time.time(), reason)
    since, hangs, reason = found.decode().split(' ', 2)
    return Ending(float(since), reason, int(hangs))


def is_over(store: Store, round_id: int) -> bool:
    """True once the round's number is outdated; costs one request."""
    return present_round(store) > round_id


def _last_met_before(store: Store, round_id: int) -> int | None:
    while round_id > 0:
        round_id -= 1
        barrier = peek(store, f'met/{round_id}')  # no rank waits there now
        if barrier is None:
            return None
        if is_open(barrier):
            return round_id
    return None


def report_of(store: Store, round_id: int, rank: int) -> bytes | None:
    """A rank's report in a round; None if there is none, or its keys are deleted.

    If the rank has not joined it: its report of the previous rendezvous.
    """
    found = peek(store, place_in(round_id, rank))
    if found is not None:
        return exchange.unpacked(found)
    before = _last_met_before(store, round_id)
    return None if before is None else report_of(store, before, rank)


class Rendezvous:
    """The rendezvous of one process of the job.

    One thread at a time uses `store`, which outlives the workers. Barriers use the connection of
    their rendezvous: one thread may join a round while another waits at a barrier.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self._joined: set[int] = set()
        self._signed: set[str] = set()
        # Follows the report, which `unpacked` ignores: two processes may bring equal ones.
        self._token = secrets.token_bytes(8)
        self._forgetting: threading.Thread | None = None

    def predecessor_took_part(self) -> bool:
        """End the present round if an earlier process of this rank is in it; True if so."""
        round_id = present_round(self.store)
        if round_id in self._joined or not counters.has_signed(
            self.store, f'here/{round_id}', self.rank
        ):
            return False
        end_round(self.store, round_id, f'rank {self.rank} was started again')
        return True

    def meet(
        self, report: Callable[[], bytes], timeout: timedelta, after: int | None = None
    ) -> RendezvousResult:
        """Join the present round, or the next one that is not broken, and wait for all ranks.

        Args:
            report: called in each round that this process tries to join.
            timeout: limit of the wait for ranks that send no heartbeats.
            after: number of this process's previous round, which is ended if it is not over.

        Raises:
            FencedOut: this process was in an earlier round and has been replaced since.
            SparseCheckpointError: some ranks did not respond in time; names them.
        """
        deadline = Deadline(timeout, self._heartbeats)
        while True:
            round_id = present_round(self.store)
            if after is not None and round_id <= after:
                end_round(self.store, after, f'rank {self.rank} left')
                continue
            if not self._join(round_id, report(), survivor=after is not None):
                end_round(self.store, round_id, f'rank {self.rank} was started again')
                continue
            if self._pass(self.store, round_id, f'met/{round_id}', deadline):
                if after is None:
                    self._forget_before(self.store, round_id)
                of_round = _of_round(self.store, round_id)
                reports = exchange.handed_out(of_round)
                return RendezvousResult(round_id, of_round, reports, self.store)

    @property
    def newest_joined(self) -> int | None:
        """The newest round that this process has joined, or None."""
        return max(self._joined, default=None)

    def barrier(self, result: RendezvousResult, name: str, timeout: timedelta | None) -> None:
        """Wait until all ranks of the round have reached `name`, one of `BARRIERS`.

        Without a `timeout`, all ranks are watched, and a hanging rank ends the round.

        Raises:
            RoundEnded: a failure was announced meanwhile.
            SparseCheckpointError: some ranks did not respond in time.
        """
        deadline = None if timeout is None else Deadline(timeout)
        self.sign(result, name)
        barrier, store = _barrier_key(result.round, name), result.connection
        if not self._pass(store, result.round, barrier, deadline):
            raise RoundEnded(how_broken(store, result.round).reason)
        if name == _END_OF_A_RECOVERY:
            self._forget_before(store, result.round)

    def sign(self, result: RendezvousResult, name: str) -> None:
        """Arrive at a barrier without waiting; a repeated call has no effect."""
        assert name in BARRIERS  # otherwise a failure would not wake up ranks that wait there
        barrier, store = _barrier_key(result.round, name), result.connection
        if barrier not in self._signed:
            self._signed.add(barrier)
            if store.add(f'round/{result.round}/barrier/{name}', 1) == self.world_size:
                open_barrier(store, barrier)

    def _join(self, round_id: int, report: bytes, survivor: bool) -> bool:
        """Take this rank's place in the round; False if a dead predecessor has it."""
        # The store keeps the keys of the last round that all ranks met in, and of later rounds.
        slept_through = range(max(self._joined, default=round_id) + 1, round_id)
        if any(counters.has_signed(self.store, f'here/{one}', self.rank) for one in slept_through):
            raise FencedOut(_REPLACED.format(self.rank))
        left = exchange.packed(report) + self._token
        self._joined.add(round_id)  # even if the store's answer is lost
        place = place_in(round_id, self.rank)
        found = self.store.compare_set(place, '', left)  # type: ignore[arg-type]
        if bytes(found) != left:
            if survivor:
                raise FencedOut(_REPLACED.format(self.rank))
            self._joined.discard(round_id)
            return False
        if counters.sign(self.store, f'here/{round_id}', self.rank, self.world_size):
            self._hand_out_reports(round_id)
        return True

    def _hand_out_reports(self, round_id: int) -> None:
        """Give the reports of all ranks to all, by the last one to join."""
        places = [place_in(round_id, rank) for rank in range(self.world_size)]
        everything = exchange.gather(self.store, places)
        exchange.hand_out(_of_round(self.store, round_id), everything)
        open_barrier(self.store, f'met/{round_id}')

    def _pass(self, store: Store, round_id: int, barrier: str, deadline: Deadline | None) -> bool:
        """Wait at a barrier; False if the round is over."""
        if not self._await(store, round_id, barrier, deadline):
            return False
        if is_open(peek(store, barrier)):
            return True
        complete_end(store, round_id)
        return False

    def _await(self, store: Store, round_id: int, barrier: str, deadline: Deadline | None) -> bool:
        """Wait until a barrier is opened or shut; False if the round is over."""
        while not has_moved(store, barrier, math.inf if deadline is None else deadline.until):
            repair(store)
            if is_over(store, round_id):
                return False
            if deadline is not None and deadline.is_over():
                raise SparseCheckpointError(self._missing(store, round_id))
        return True

    def finish(self) -> None:
        """Wait for the deletion of keys; this rank joins no further round."""
        if self._forgetting is not None:
            self._forgetting.join(_FINISH_S)

    def _forget_before(self, store: Store, round_id: int) -> None:
        """Delete, on a separate thread, the keys of rounds that no rank reads any more.

        All ranks have met, so none waits in an earlier round; but threads that watched the previous
        round may still read its keys.
        """
        if self.rank == 0 and not (self._forgetting and self._forgetting.is_alive()):
            self._forgetting = threading.Thread(
                target=_forget,
                args=(store.clone, round_id - 1),
                name='sparse-ckpt-forget',
                daemon=True,
            )
            self._forgetting.start()

    def _heartbeats(self) -> dict[int, int]:
        """Heartbeats of missing ranks; none if one of them has not sent any yet."""
        missing = _absent_in(self.store, present_round(self.store), self.world_size)
        found = count_heartbeats(self.store, missing)
        return found if all(found.values()) else {}

    def _missing(self, store: Store, round_id: int) -> str:
        missing = _absent_in(store, round_id, self.world_size)
        return (
            f'Ranks {missing[:8] or "that had joined"} did not respond in time. See the log of '
            'their node; --distributed-timeout-minutes sets the time.'
        )


def _absent_in(store: Store, round_id: int, world_size: int) -> list[int]:
    return counters.missing(store, f'here/{round_id}', world_size)


def _forget(connect: Callable[[], Store], first_kept: int) -> None:
    try:
        store = connect()
        if is_over(store, first_kept):  # otherwise this is the store of the job's next attempt
            for key in _outdated(store.list_keys(), first_kept):
                store.delete_key(key)
    except DistError as error:
        logger.warning('keys of earlier rounds were not deleted from the store: %s', error)


def _outdated(keys: Sequence[str], first_kept: int) -> list[str]:
    """Keys of earlier rounds, and keys of all attempts of the job except the newest."""
    of_a_round = [(key, found) for key in keys if (found := _OF_A_ROUND.fullmatch(key))]
    of_an_attempt = [(key, found) for key in keys if (found := _OF_AN_ATTEMPT.fullmatch(key))]
    newest = max((int(found[1]) for _, found in of_an_attempt), default=0)
    return [
        *(key for key, found in of_a_round if int(found[1]) < first_kept),
        *(key for key, found in of_an_attempt if int(found[1]) < newest),
    ]


def _of_round(store: Store, round_id: int) -> Store:
    return PrefixStore(f'round/{round_id}', store)


def _barrier_key(round_id: int, name: str) -> str:
    return f'round/{round_id}/barrier/{name}/all'
