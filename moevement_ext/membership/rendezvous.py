# SPDX-License-Identifier: Apache-2.0
"""All ranks of a job meet, again after every failure, in a store that outlives them.

The launcher's store keeps what dead workers wrote. An *epoch* is a set of processes, one per rank,
that met under a number nobody used before; process groups are built under its name. Epochs end when
somebody breaks them: a rank that lost a peer, the launcher that saw a worker die, a rank whose
neighbour sends no more heartbeats, or a new process that finds its own predecessor in the epoch. To
break an epoch is the agreed verdict that a failure happened: everybody then joins the next one with
a report of what it still has, and a rank that does not join is gone.

Keys: `epoch` (the present number), `broken/<e>` (when and why it ended), `here/<e>/...` and
`answered/<e>/...` (ranks that have joined, and answered: see `attendance`), `join/<e>/<rank>` (what
it has brought, there before it answers), `coming/<e>/<rank>` (the same of a new process, before it
joins), `begun/<e>` (how many counters of the former), `full/<e>` and `met/<e>` (gates: all
have come; all have answered, behind which is what all have brought, packed, or the digest of that),
`gathers/<e>` (who packs), `reports/<e>/<part>` (what is packed, if it is much), `beat/<e>/...`
(`signs` of life), `progress/<e>/<rank>` (newest committed iteration), `epoch/<e>/...` (what the
ranks of an epoch tell each other; gates of barriers). Rank 0 deletes those of an epoch when all
have met for the second time since, beside training; and what ranks that started together in epoch
e have left for those that join them (`job/<life of the store>/<e>/...`), once the job has started
again.

To end an epoch is to say why, to shut its gates, and to raise the number, in this order: who comes
upon a number that was raised has nothing to do, and who waits at a gate need not ask.
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
from moevement_ext.membership import attendance, brought
from moevement_ext.membership.attendance import RankArrival
from moevement_ext.membership.gates import behind, has_moved, is_open, open_gate, shut_gate
from moevement_ext.membership.node_copy import NodeCopy
from moevement_ext.membership.patience import Patience
from moevement_ext.membership.signs import hear
from moevement_ext.store import nearest
from moevement_ext.store.peek import peek

logger = logging.getLogger(__name__)

BARRIERS = ('ready', 'replayed', 'trained', 'over')
"""Names that a barrier can have, once in an epoch."""
_END_OF_A_RECOVERY = 'replayed'
"""What is forgotten earlier holds up who recovers: a large job asks the store for much, then."""
_FIRST_LOOKERS = 3
_OTHER_LOOKERS = 8
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.002, 0.064
_FINISH_SECONDS = 5.0
_OF_AN_EPOCH = re.compile(
    r'(?:broken|coming|join|here|begun|full|met|answered|gathers|reports|beat|progress|epoch)'
    r'/(\d+)(?:/.*)?'
)
_OF_A_LIFE = re.compile(r'job/[0-9a-f]+/(\d+)/.*')


class EpochBroken(SparseCheckpointError):
    """A failure was announced; everybody moves on to the next epoch."""


class FencedOut(SparseCheckpointError):
    """Another process took the place of this rank while it was away; it must not go on."""


class Meeting(NamedTuple):
    """All ranks of one epoch."""

    epoch: int
    store: Store
    """For keys of this epoch only."""
    reports: list[bytes]
    """What each rank brought, by rank."""
    connection: Store
    """With the launcher's store, by which this process has met the others."""


def launcher_store(timeout: timedelta) -> Store | None:
    """A connection to the store of torchrun's agent, None under any other launcher."""
    if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True':
        return None
    return nearest.connect(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), timeout)


def present_epoch(store: Store) -> int:
    """Number of the epoch that is open or in which the job runs."""
    return store.add('epoch', 0)


def break_epoch(store: Store, epoch: int, reason: str) -> bool:
    """End `epoch`, once; anybody can do what is left after a kill half-way. True: nobody had."""
    if is_over(store, epoch):
        return False
    announced = f'{time.time():.6f} {reason or "unknown"}'
    if store.compare_set(_broken(epoch), '', announced) == announced.encode():
        _finish_breaking(store, epoch)
        return True
    see_to_the_end(store, epoch)
    return False


def _finish_breaking(store: Store, epoch: int) -> None:
    for gate in _gates(epoch):
        shut_gate(store, gate)
    store.compare_set('epoch', str(epoch), str(epoch + 1))


def see_to_the_end(store: Store, epoch: int) -> None:
    """Have an epoch end that somebody has begun to end, and is likely to be done with soon.

    All ranks learn of it in the first of several steps; they do not all take the others.
    """
    pause_s = _FIRST_PAUSE_S
    while not is_over(store, epoch):
        if pause_s > _LAST_PAUSE_S:  # whoever began has died half-way
            _finish_breaking(store, epoch)
            return
        time.sleep(pause_s)
        pause_s *= 2


def mend(store: Store) -> None:
    """End the present epoch if whoever began to has died half-way."""
    epoch = present_epoch(store)
    if is_broken(store, epoch):
        see_to_the_end(store, epoch)


def announce_failure(store: Store, rank: int, reason: str) -> None:
    """The launcher saw the worker of `rank` die: end the epoch it took part in.

    If the others have already moved on without it, nothing is left to do.
    """
    epoch = present_epoch(store)
    if attendance.has_signed(store, _here(epoch), rank):
        break_epoch(store, epoch, reason)


class Ending(NamedTuple):
    """How an epoch ended."""

    since: float
    """When that was announced: seconds since 1970, by the clock of who did."""
    reason: str


def is_broken(store: Store, epoch: int) -> bool:
    """True once somebody has begun to end an epoch; may be asked while it lasts."""
    return store.check([_broken(epoch)])


def how_broken(store: Store, epoch: int) -> Ending | None:
    """When and why an epoch was ended. Only of one that is over: see `peek`."""
    found = peek(store, _broken(epoch))
    if found is None:
        return None
    since, _, reason = found.decode().partition(' ')
    return Ending(float(since), reason)


def why_broken(store: Store, epoch: int) -> str | None:
    """The reason an epoch was ended with. Only of one that is over: see `peek`."""
    found = how_broken(store, epoch)
    return found.reason if found else None


def is_over(store: Store, epoch: int) -> bool:
    """True if everybody moves on, or has moved on, to a later one; one request."""
    return present_epoch(store) > epoch


class Absent(NamedTuple):
    """A rank that others wait for, and the last epoch in which its process was seen."""

    epoch: int
    rank: int


def absent(store: Store, world_size: int) -> list[Absent]:
    """Ranks that have not joined the present epoch; none before all have met for the first time."""
    epoch = present_epoch(store)
    missing = _absent_in(store, epoch, world_size)
    last_met = _last_met_before(store, epoch) if missing else None
    return [] if last_met is None else [Absent(last_met, rank) for rank in missing]


def _last_met_before(store: Store, epoch: int) -> int | None:
    while epoch > 0:
        epoch -= 1
        gate = peek(store, _met(epoch))  # nobody waits there any more
        if gate is None:
            return None
        if is_open(gate):
            return epoch
    return None


def holding_up(store: Store, world_size: int) -> list[Absent]:
    """Ranks that do not answer in the present epoch, which all have joined.

    They may have stopped since they joined. If all have answered, it is the one that packs.
    """
    epoch = present_epoch(store)
    if not store.check([_full(epoch)]) or store.check([_met(epoch)]):
        return []
    silent = attendance.missing(store, _answered(epoch), world_size)
    packs = peek(store, _gathers(epoch))
    found = silent or ([int(packs)] if packs is not None else [])
    return [Absent(epoch, rank) for rank in found]


def brought_to(store: Store, epoch: int, rank: int) -> bytes | None:
    """What a rank has brought to an epoch; None if it has not joined, or that is forgotten.

    If it has stopped in the middle of joining: what it came with, or brought to the last one.
    """
    found = peek(store, _place(epoch, rank)) or peek(store, _coming(epoch, rank))
    if found is not None:
        return brought.unpacked(found)
    before = _last_met_before(store, epoch)
    return None if before is None else brought_to(store, before, rank)


class Rendezvous:
    """One process of the job, in the store where it meets the others.

    Args:
        store: outlives the workers; used by one thread at a time. Barriers use the connection of
            their meeting: one thread may meet the others while another stands at a barrier.
        rank: of this process.
        world_size: number of processes that must come.
        node: where the ranks of its node read for each other what all have brought; None: each
            reads for itself.
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
        """This rank is one of the few that look who does not come. Any thread."""
        self._forgetting: threading.Thread | None = None

    def predecessor_took_part(self) -> bool:
        """True if an earlier process of this rank is in the present epoch, which then is broken."""
        epoch = present_epoch(self.store)
        if epoch in self._joined or not attendance.has_signed(self.store, _here(epoch), self.rank):
            return False
        break_epoch(self.store, epoch, f'rank {self.rank} was started again')
        return True

    def meet(
        self, report: Callable[[], bytes], timeout: timedelta, after: int | None = None
    ) -> Meeting:
        """Join the present epoch, or the first one that lasts, and wait for all ranks.

        Args:
            report: asked for anew in each epoch that is tried.
            timeout: how long to wait for a last rank of which nothing is heard.
            after: number of the epoch that this process comes from, which must be over.

        Raises:
            FencedOut: this process was in an earlier epoch and has been replaced since.
            SparseCheckpointError: some ranks did not come in time; names them.
        """
        patience = Patience[Absent](timeout, self._signs)
        while True:
            epoch = present_epoch(self.store)
            if after is not None and epoch <= after:
                break_epoch(self.store, after, f'rank {self.rank} left')
                continue
            if not self._join(epoch, report(), survivor=after is not None):
                break_epoch(self.store, epoch, f'rank {self.rank} was started again')
                continue
            reports = self._wait_for_all(epoch, patience)
            if reports is not None:
                if after is None:
                    self._forget_before(self.store, epoch)
                of_epoch = PrefixStore(f'epoch/{epoch}', self.store)
                return Meeting(epoch, of_epoch, reports, self.store)

    @property
    def newest_joined(self) -> int | None:
        """The newest epoch in which this process has taken its place; None: there is none."""
        return max(self._joined, default=None)

    def barrier(self, meeting: Meeting, name: str, timeout: timedelta | None) -> None:
        """Wait until all ranks of the epoch have come here, to one of `BARRIERS`.

        Args:
            meeting: of the epoch.
            name: of the barrier.
            timeout: None: all are watched, and who does not come ends the epoch.

        Raises:
            EpochBroken: a failure was announced meanwhile.
            SparseCheckpointError: some ranks did not come in time.
        """
        patience = None if timeout is None else Patience[Absent](timeout)
        self.sign(meeting, name)
        gate, store = _barrier_gate(meeting.epoch, name), meeting.connection
        if self._pass(store, meeting.epoch, gate, patience) is None:
            raise EpochBroken(why_broken(store, meeting.epoch) or 'unknown')
        if name == _END_OF_A_RECOVERY:
            self._forget_before(store, meeting.epoch)

    def sign(self, meeting: Meeting, name: str) -> None:
        """Come to a barrier, and wait there later if at all; to come again changes nothing."""
        assert name in BARRIERS  # else a failure would wake up no rank that waits there
        gate, store = _barrier_gate(meeting.epoch, name), meeting.connection
        if gate not in self._signed:
            self._signed.add(gate)
            if store.add(f'epoch/{meeting.epoch}/barrier/{name}', 1) == self.world_size:
                open_gate(store, gate)

    def _join(self, epoch: int, report: bytes, survivor: bool) -> bool:
        """Take this rank's place; False if a dead predecessor has it."""
        left = brought.packed(report)
        if not survivor:  # nobody would know which process this is, should it stop in between
            self.store.set(_coming(epoch, self.rank), left)  # type: ignore[arg-type]
        self._joined.add(epoch)  # also if the answer is lost
        arrival = attendance.sign(self.store, _here(epoch), self.rank, self.world_size)
        if not arrival.is_first:
            if survivor:
                raise FencedOut(f'rank {self.rank} was replaced by another process; this one ends')
            self._joined.discard(epoch)
            return False
        self.store.set(_place(epoch, self.rank), left)  # type: ignore[arg-type]
        self.looks_for_others = self._is_to_look(epoch, arrival)
        if arrival.is_last:
            open_gate(self.store, _full(epoch))
        return True

    def _is_to_look(self, epoch: int, arrival: RankArrival) -> bool:
        """Those that came first are, and some that are spread over the others.

        Ranks of a node come, and are lost, together.
        """
        every = max(self.world_size // _OTHER_LOOKERS, 1)
        is_early = arrival.order <= _FIRST_LOOKERS or arrival.order % every == 1 % every
        is_first = arrival.order == 1 and self.store.add(f'begun/{epoch}', 1) <= _FIRST_LOOKERS
        return is_first or (arrival.is_spread and is_early)

    def _wait_for_all(self, epoch: int, patience: Patience[Absent]) -> list[bytes] | None:
        """What all have brought; None if the epoch was broken before all were there and alive."""
        if not self._await(self.store, epoch, _full(epoch), patience):
            return None
        # A place may be that of a rank that died waiting.
        answer = attendance.sign(self.store, _answered(epoch), self.rank, self.world_size)
        if answer.is_last:
            self.store.set(_gathers(epoch), str(self.rank))
            places = [_place(epoch, rank) for rank in range(self.world_size)]
            everything = brought.gather(self.store, places)
            left = brought.hand_out(self.store, _reports(epoch), everything)
            open_gate(self.store, _met(epoch), left)
        found = self._pass(self.store, epoch, _met(epoch), patience)
        if found is None:
            return None
        return brought.handed_out(self.store, _reports(epoch), found, self._node)

    def _pass(
        self, store: Store, epoch: int, gate: str, patience: Patience[Absent] | None
    ) -> bytes | None:
        """Wait at a gate; what is behind it, None if the epoch is over."""
        if not self._await(store, epoch, gate, patience):
            return None
        found = behind(store, gate)
        if found is None:
            see_to_the_end(store, epoch)
        return found

    def _await(
        self, store: Store, epoch: int, gate: str, patience: Patience[Absent] | None
    ) -> bool:
        """Wait until a gate is opened or shut; False if it never will be."""
        while not has_moved(store, gate, math.inf if patience is None else patience.until):
            mend(store)
            if is_over(store, epoch):
                return False
            if patience is not None and patience.is_over():
                raise SparseCheckpointError(self._missing(store, epoch))
        return True

    def finish(self) -> None:
        """This rank joins no further epoch: end what goes on beside."""
        if self._forgetting is not None:
            self._forgetting.join(_FINISH_SECONDS)

    def _forget_before(self, store: Store, epoch: int) -> None:
        """Delete the keys of epochs that nobody looks at any more, on a thread of its own.

        All have met, so that none waits in an earlier epoch; threads that watched the last one may
        not have ended yet.
        """
        if self.rank == 0 and not (self._forgetting and self._forgetting.is_alive()):
            self._forgetting = threading.Thread(
                target=_forget,
                args=(store.clone, epoch - 1),
                name='sparse-ckpt-forget',
                daemon=True,
            )
            self._forgetting.start()

    def _signs(self) -> dict[Absent, int]:
        """Heartbeats of those that are awaited, in the epochs that they come from."""
        return {
            one: hear(self.store, one.epoch, one.rank)
            for one in absent(self.store, self.world_size)
        }

    def _missing(self, store: Store, epoch: int) -> str:
        missing = _absent_in(store, epoch, self.world_size)
        return (
            f'Ranks {missing[:8] or "that had joined"} did not come in time. See the log of their '
            'node; --distributed-timeout-minutes sets the time.'
        )


def _place(epoch: int, rank: int) -> str:
    return f'join/{epoch}/{rank}'


def _coming(epoch: int, rank: int) -> str:
    return f'coming/{epoch}/{rank}'


def _absent_in(store: Store, epoch: int, world_size: int) -> list[int]:
    return attendance.missing(store, _here(epoch), world_size)


def _forget(connect: Callable[[], Store], first_kept: int) -> None:
    try:
        store = connect()
        if is_over(store, first_kept):  # else it is another store: that of the job's next life
            for key in _outdated(store.list_keys(), first_kept):
                store.delete_key(key)
    except DistError as error:
        logger.warning('keys of former epochs stay in the store: %s', error)


def _outdated(keys: Sequence[str], first_kept: int) -> list[str]:
    """Those of former epochs, and those of all lives of the job but the newest that left any."""
    of_an_epoch = [(key, found) for key in keys if (found := _OF_AN_EPOCH.fullmatch(key))]
    of_a_life = [(key, found) for key in keys if (found := _OF_A_LIFE.fullmatch(key))]
    newest = max((int(found[1]) for _, found in of_a_life), default=0)
    return [
        *(key for key, found in of_an_epoch if int(found[1]) < first_kept),
        *(key for key, found in of_a_life if int(found[1]) < newest),
    ]


def _here(epoch: int) -> str:
    return f'here/{epoch}'


def _answered(epoch: int) -> str:
    return f'answered/{epoch}'


def _gathers(epoch: int) -> str:
    return f'gathers/{epoch}'


def _full(epoch: int) -> str:
    return f'full/{epoch}'


def _reports(epoch: int) -> str:
    return f'reports/{epoch}'


def _met(epoch: int) -> str:
    return f'met/{epoch}'


def _barrier_gate(epoch: int, name: str) -> str:
    return f'epoch/{epoch}/barrier/{name}/all'


def _gates(epoch: int) -> list[str]:
    return [_full(epoch), _met(epoch), *(_barrier_gate(epoch, name) for name in BARRIERS)]


def _broken(epoch: int) -> str:
    return f'broken/{epoch}'
