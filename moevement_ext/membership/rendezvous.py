# SPDX-License-Identifier: Apache-2.0
"""All ranks of a job meet, again after every failure, in a store that outlives them.

The launcher's store keeps what dead workers wrote. A *round* is a set of processes, one per rank,
that met under a new number; process groups are built under its name. A round is ended by a rank
that lost a peer, the launcher that saw a worker die, a rank whose neighbour sends no more
heartbeats, or a new process that finds its predecessor in the round. The end is the agreed verdict
that a failure happened: each rank joins the next round with a report, or is gone.

Keys: see "Keys of the store" in `docs/design.md`.

The end takes three steps, in this order: say why, close the barriers, raise the number. So a rank
that sees the new number can rely on closed barriers.
"""

import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistError, PrefixStore, Store

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.membership import arrivals, gathered_reports, packing
from moevement_ext.membership.arrivals import RankArrival, place_in
from moevement_ext.membership.barriers import (
    behind,
    close_barrier,
    has_moved,
    is_open,
    open_barrier,
)
from moevement_ext.membership.deadline import Absent, Deadline
from moevement_ext.membership.heartbeats import hear
from moevement_ext.membership.node_copy import NodeCopy
from moevement_ext.store import nearest
from moevement_ext.store.peek import peek

logger = logging.getLogger(__name__)

BARRIERS = ('ready', 'replayed', 'trained', 'over')
"""Names that a barrier can have, once in a round."""
# Deleting keys earlier would delay a recovery, in which a large job sends many requests.
_END_OF_A_RECOVERY = 'replayed'
_FIRST_LOOKERS = 3
_OTHER_LOOKERS = 8
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.002, 0.064
_FINISH_SECONDS = 5.0
_REPLACED = 'rank {} was replaced by another process; this one ends (a --node-rank given twice?)'
_OF_A_ROUND = re.compile(
    r'(?:broken|coming|join|here|begun|full|met|answered|gathers|reports|beat|progress|round)'
    r'/(\d+)(?:/.*)?'
)
_OF_AN_ATTEMPT = re.compile(r'job/[0-9a-f]+/(\d+)/.*')


class RoundEnded(SparseCheckpointError):
    """A failure was announced; all ranks move on to the next round."""


class FencedOut(SparseCheckpointError):
    """Another process took the place of this rank while it was away; it must not go on."""


class RendezvousResult(NamedTuple):
    """All ranks of one round."""

    round: int
    store: Store
    """For keys of this round only."""
    reports: list[bytes]
    """What each rank brought, by rank."""
    connection: Store
    """The connection with the launcher's store by which this process has met the others."""


def launcher_store(timeout: timedelta) -> Store | None:
    """A connection to the store of torchrun's agent, None under any other launcher."""
    if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True':
        return None
    return nearest.connect(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), timeout)


def present_round(store: Store) -> int:
    """Number of the round that is open or in which the job runs."""
    return store.add('round', 0)


def end_round(store: Store, round: int, reason: str) -> bool:
    """End `round`, once; any process completes it after a kill. True if this call began it."""
    if is_over(store, round):
        return False
    announced = f'{time.time():.6f} {reason or "unknown"}'
    if store.compare_set(f'broken/{round}', '', announced) == announced.encode():
        _finish_breaking(store, round)
        return True
    see_to_the_end(store, round)
    return False


def _finish_breaking(store: Store, round: int) -> None:
    of_all = (_barrier_key(round, name) for name in BARRIERS)
    for barrier in (f'full/{round}', f'met/{round}', *of_all):
        close_barrier(store, barrier)
    store.compare_set('round', str(round), str(round + 1))


def see_to_the_end(store: Store, round: int) -> None:
    """Complete the end of a round that another process has begun to end, if it does not.

    All ranks learn of it in the first of several steps; they do not all take the others.
    """
    pause_s = _FIRST_PAUSE_S
    while not is_over(store, round):
        if pause_s > _LAST_PAUSE_S:  # the process that began has died half-way
            _finish_breaking(store, round)
            return
        time.sleep(pause_s)
        pause_s *= 2


def repair(store: Store) -> None:
    """End the present round if the process that began to has died half-way."""
    round = present_round(store)
    if is_broken(store, round):
        see_to_the_end(store, round)


def announce_failure(store: Store, rank: int, reason: str) -> None:
    """The launcher saw the worker of `rank` die: end the round it took part in.

    If the others have already moved on without it, nothing is left to do.
    """
    round = present_round(store)
    if arrivals.has_signed(store, f'here/{round}', rank):
        end_round(store, round, reason)


class Ending(NamedTuple):
    """How a round ended."""

    since: float
    """Time of the announcement: seconds since 1970, by the announcing process's clock."""
    reason: str


def is_broken(store: Store, round: int) -> bool:
    """True once a process has begun to end a round; may be asked while it lasts."""
    return store.check([f'broken/{round}'])


def how_broken(store: Store, round: int) -> Ending | None:
    """When and why a round was ended. Only of one that is over: see `peek`."""
    found = peek(store, f'broken/{round}')
    if found is None:
        return None
    since, _, reason = found.decode().partition(' ')
    return Ending(float(since), reason)


def why_broken(store: Store, round: int) -> str | None:
    """The reason a round was ended with. Only of one that is over: see `peek`."""
    found = how_broken(store, round)
    return found.reason if found else None


def is_over(store: Store, round: int) -> bool:
    """True if all ranks move on, or have moved on, to a later one; one request."""
    return present_round(store) > round


def absent(store: Store, world_size: int) -> list[Absent]:
    """Ranks that have not joined the present round; none before all have met for the first time."""
    round = present_round(store)
    missing = _absent_in(store, round, world_size)
    last_met = _last_met_before(store, round) if missing else None
    return [] if last_met is None else [Absent(last_met, rank) for rank in missing]


def _last_met_before(store: Store, round: int) -> int | None:
    while round > 0:
        round -= 1
        barrier = peek(store, f'met/{round}')  # no rank waits there any more
        if barrier is None:
            return None
        if is_open(barrier):
            return round
    return None


def holding_up(store: Store, world_size: int) -> list[Absent]:
    """Ranks that do not answer in the present round, which all have joined.

    They may have stopped since they joined. If all have answered, it is the one that packs.
    """
    round = present_round(store)
    if not store.check([f'full/{round}']) or store.check([f'met/{round}']):
        return []
    silent = arrivals.missing(store, f'answered/{round}', world_size)
    packs = peek(store, f'gathers/{round}')
    found = silent or ([int(packs)] if packs is not None else [])
    return [Absent(round, rank) for rank in found]


def brought_to(store: Store, round: int, rank: int) -> bytes | None:
    """What a rank has brought to a round; None if it has not joined, or that is forgotten.

    If it has stopped in the middle of joining: what it came with, or brought to the last one.
    """
    found = peek(store, place_in(round, rank)) or peek(store, f'coming/{round}/{rank}')
    if found is not None:
        return packing.unpacked(found)
    before = _last_met_before(store, round)
    return None if before is None else brought_to(store, before, rank)


class Rendezvous:
    """One process of the job, in the store where it meets the others.

    One thread at a time uses `store`, which outlives the workers. Barriers use the connection of
    their rendezvous: one thread may meet the others while another stands at a barrier. With `node`
    the ranks of a node read for each other what all have brought.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, node: NodeCopy | None = None
    ) -> None:
        self.store = store
        self._node = node
        self.rank = rank
        self.world_size = world_size
        self._joined: set[int] = set()
        self._signed: set[str] = set()
        self.looks_for_others = False
        """This rank is one of the few that look for missing ranks. Any thread."""
        self._forgetting: threading.Thread | None = None

    def predecessor_took_part(self) -> bool:
        """True if an earlier process of this rank is in the present round, which then is broken."""
        round = present_round(self.store)
        if round in self._joined or not arrivals.has_signed(self.store, f'here/{round}', self.rank):
            return False
        end_round(self.store, round, f'rank {self.rank} was started again')
        return True

    def meet(
        self, report: Callable[[], bytes], timeout: timedelta, after: int | None = None
    ) -> RendezvousResult:
        """Join the present round, or the first one that lasts, and wait for all ranks.

        Args:
            report: asked for anew in each round that is tried.
            timeout: how long to wait for a last rank of which nothing is heard.
            after: number of the round that this process comes from, which must be over.

        Raises:
            FencedOut: this process was in an earlier round and has been replaced since.
            SparseCheckpointError: some ranks did not come in time; names them.
        """
        deadline = Deadline(timeout, self._heartbeats)
        while True:
            round = present_round(self.store)
            if after is not None and round <= after:
                end_round(self.store, after, f'rank {self.rank} left')
                continue
            if not self._join(round, report(), survivor=after is not None):
                end_round(self.store, round, f'rank {self.rank} was started again')
                continue
            reports = self._wait_for_all(round, deadline)
            if reports is not None:
                if after is None:
                    self._forget_before(self.store, round)
                of_round = PrefixStore(f'round/{round}', self.store)
                return RendezvousResult(round, of_round, reports, self.store)

    @property
    def newest_joined(self) -> int | None:
        """The newest round in which this process has taken its place, or None."""
        return max(self._joined, default=None)

    def barrier(self, result: RendezvousResult, name: str, timeout: timedelta | None) -> None:
        """Wait until all ranks of the round have come here, to one of `BARRIERS`.

        Without a `timeout` all are watched, and a rank that does not come ends the round.

        Raises:
            RoundEnded: a failure was announced meanwhile.
            SparseCheckpointError: some ranks did not come in time.
        """
        deadline = None if timeout is None else Deadline(timeout)
        self.sign(result, name)
        barrier, store = _barrier_key(result.round, name), result.connection
        if self._pass(store, result.round, barrier, deadline) is None:
            raise RoundEnded(why_broken(store, result.round) or 'unknown')
        if name == _END_OF_A_RECOVERY:
            self._forget_before(store, result.round)

    def sign(self, result: RendezvousResult, name: str) -> None:
        """Come to a barrier, and wait there later if at all; to come again changes nothing."""
        assert name in BARRIERS  # else a failure would wake up no rank that waits there
        barrier, store = _barrier_key(result.round, name), result.connection
        if barrier not in self._signed:
            self._signed.add(barrier)
            if store.add(f'round/{result.round}/barrier/{name}', 1) == self.world_size:
                open_barrier(store, barrier)

    def _join(self, round: int, report: bytes, survivor: bool) -> bool:
        """Take this rank's place; False if a dead predecessor has it."""
        slept_through = range(max(self._joined, default=round) + 1, round)[-2:]  # kept keys
        if any(arrivals.has_signed(self.store, f'here/{one}', self.rank) for one in slept_through):
            raise FencedOut(_REPLACED.format(self.rank))
        left = packing.packed(report)
        if not survivor:  # no rank would know which process this is, should it stop in between
            self.store.set(f'coming/{round}/{self.rank}', left)  # type: ignore[arg-type]
        self._joined.add(round)  # also if the answer is lost
        arrival = arrivals.sign(self.store, f'here/{round}', self.rank, self.world_size)
        if not arrival.is_first:
            if survivor:
                raise FencedOut(_REPLACED.format(self.rank))
            self._joined.discard(round)
            return False
        self.store.set(place_in(round, self.rank), left)  # type: ignore[arg-type]
        self.looks_for_others = self._is_to_look(round, arrival)
        if arrival.is_last:
            open_barrier(self.store, f'full/{round}')
        return True

    def _is_to_look(self, round: int, arrival: RankArrival) -> bool:
        """Those that came first are, and some that are spread over the others.

        Ranks of a node come, and are lost, together.
        """
        every = max(self.world_size // _OTHER_LOOKERS, 1)
        is_early = arrival.order <= _FIRST_LOOKERS or arrival.order % every == 1 % every
        is_first = arrival.order == 1 and self.store.add(f'begun/{round}', 1) <= _FIRST_LOOKERS
        return is_first or (arrival.is_spread and is_early)

    def _wait_for_all(self, round: int, deadline: Deadline) -> list[bytes] | None:
        """What all have brought; None if the round was broken before all were there and alive."""
        if not self._await(self.store, round, f'full/{round}', deadline):
            return None
        # A place may be that of a rank that died waiting.
        answer = arrivals.sign(self.store, f'answered/{round}', self.rank, self.world_size)
        if answer.is_last:
            self.store.set(f'gathers/{round}', str(self.rank))
            places = [place_in(round, rank) for rank in range(self.world_size)]
            everything = gathered_reports.gather(self.store, places)
            left = gathered_reports.hand_out(self.store, f'reports/{round}', everything)
            open_barrier(self.store, f'met/{round}', left)
        found = self._pass(self.store, round, f'met/{round}', deadline)
        if found is None:
            return None
        return gathered_reports.handed_out(self.store, f'reports/{round}', found, self._node)

    def _pass(
        self, store: Store, round: int, barrier: str, deadline: Deadline | None
    ) -> bytes | None:
        """Wait at a barrier; what is behind it, None if the round is over."""
        if not self._await(store, round, barrier, deadline):
            return None
        found = behind(store, barrier)
        if found is None:
            see_to_the_end(store, round)
        return found

    def _await(self, store: Store, round: int, barrier: str, deadline: Deadline | None) -> bool:
        """Wait until a barrier is opened or shut; False if it never will be."""
        while not has_moved(store, barrier, math.inf if deadline is None else deadline.until):
            repair(store)
            if is_over(store, round):
                return False
            if deadline is not None and deadline.is_over():
                raise SparseCheckpointError(self._missing(store, round))
        return True

    def finish(self) -> None:
        """This rank joins no further round: end what goes on beside."""
        if self._forgetting is not None:
            self._forgetting.join(_FINISH_SECONDS)

    def _forget_before(self, store: Store, round: int) -> None:
        """Delete the keys of rounds that no rank reads any more, on a thread of its own.

        All have met, so that none waits in an earlier round; threads that watched the last one may
        not have ended yet.
        """
        if self.rank == 0 and not (self._forgetting and self._forgetting.is_alive()):
            self._forgetting = threading.Thread(
                target=_forget,
                args=(store.clone, round - 1),
                name='sparse-ckpt-forget',
                daemon=True,
            )
            self._forgetting.start()

    def _heartbeats(self) -> dict[Absent, int]:
        """Heartbeats of those that are awaited, in the rounds that they come from."""
        return {
            one: hear(self.store, one.round, one.rank)
            for one in absent(self.store, self.world_size)
        }

    def _missing(self, store: Store, round: int) -> str:
        missing = _absent_in(store, round, self.world_size)
        return (
            f'Ranks {missing[:8] or "that had joined"} did not come in time. See the log of their '
            'node; --distributed-timeout-minutes sets the time.'
        )


def _absent_in(store: Store, round: int, world_size: int) -> list[int]:
    return arrivals.missing(store, f'here/{round}', world_size)


def _forget(connect: Callable[[], Store], first_kept: int) -> None:
    try:
        store = connect()
        if is_over(store, first_kept):  # else it is another store: that of the job's next attempt
            for key in _outdated(store.list_keys(), first_kept):
                store.delete_key(key)
    except DistError as error:
        logger.warning('keys of earlier rounds were not deleted from the store: %s', error)


def _outdated(keys: Sequence[str], first_kept: int) -> list[str]:
    """Those of former rounds, and those of all attempts of the job but the newest that left any."""
    of_a_round = [(key, found) for key in keys if (found := _OF_A_ROUND.fullmatch(key))]
    of_an_attempt = [(key, found) for key in keys if (found := _OF_AN_ATTEMPT.fullmatch(key))]
    newest = max((int(found[1]) for _, found in of_an_attempt), default=0)
    return [
        *(key for key, found in of_a_round if int(found[1]) < first_kept),
        *(key for key, found in of_an_attempt if int(found[1]) < newest),
    ]


def _barrier_key(round: int, name: str) -> str:
    return f'round/{round}/barrier/{name}/all'
