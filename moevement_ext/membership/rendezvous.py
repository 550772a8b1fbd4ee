# SPDX-License-Identifier: Apache-2.0
"""All ranks of a job meet, again after every failure, in a store that outlives them.

The launcher's store keeps what dead workers wrote. An *epoch* is a set of processes, one per rank,
that met under a number nobody used before; process groups are built under its name. Epochs end when
somebody breaks them: a rank that lost a peer, the launcher that saw a worker die, a rank whose
neighbour sends no more heartbeats, or a new process that finds its own predecessor in the epoch. To
break an epoch is the agreed verdict that a failure happened: everybody then joins the next one with
a report of what it still has, and a rank that does not join is gone.

Keys: `epoch` (the present number), `broken/<e>` (when and why it ended), `join/<e>/<rank>` (life,
report), `here/<e>` (ranks that have joined, in one value), `joined/<e>` and `alive/<e>` (counts),
`full/<e>` and `met/<e>` (all have come; all have answered), `beat/<e>/<rank>` (signs of life),
`progress/<e>/<rank>` (newest committed iteration), `epoch/<e>/...` (what the ranks of an epoch tell
each other). Rank 0 deletes those of an epoch when all have met for the second time since.
"""

import os
import re
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import PrefixStore, Store, TCPStore

from moevement_ext.errors import SparseCheckpointError

_FIRST_POLL_SECONDS = 0.005
_LAST_POLL_SECONDS = 0.1
_SEPARATOR = b'/'
_OF_AN_EPOCH = re.compile(
    r'(?:broken|join|here|joined|alive|full|met|beat|progress|epoch)/(\d+)(?:/.*)?'
)


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


def launcher_store(timeout: timedelta) -> Store | None:
    """A connection to the store of torchrun's agent, None under any other launcher."""
    if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True':
        return None
    return TCPStore(
        os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False, timeout=timeout
    )


def present_epoch(store: Store) -> int:
    """Number of the epoch that is open or in which the job runs."""
    return store.add('epoch', 0)


def break_epoch(store: Store, epoch: int, reason: str) -> None:
    """End `epoch`, once, whoever asks first; a kill between the two steps does no harm."""
    store.compare_set(_broken(epoch), '', f'{time.time():.6f} {reason or "unknown"}')
    store.compare_set('epoch', str(epoch), str(epoch + 1))


def announce_failure(store: Store, rank: int, reason: str) -> None:
    """The launcher saw the worker of `rank` die: end the epoch it took part in.

    If the others have already moved on without it, nothing is left to do.
    """
    epoch = present_epoch(store)
    if store.check([_place(epoch, rank)]):
        break_epoch(store, epoch, reason)


def why_broken(store: Store, epoch: int) -> str | None:
    """The reason an epoch was ended with, None while it lasts."""
    found = _how_broken(store, epoch)
    return found[1] if found else None


def broken_since(store: Store, epoch: int) -> float | None:
    """When that was announced (seconds since 1970, clock of who did), None while it lasts."""
    found = _how_broken(store, epoch)
    return float(found[0]) if found else None


def is_over(store: Store, epoch: int) -> bool:
    """True if everybody moves on, or has moved on, to a later one; one request."""
    return present_epoch(store) > epoch


def absent(store: Store, world_size: int) -> list[int]:
    """Ranks that have not joined the present epoch."""
    return _absent_in(store, present_epoch(store), world_size)


def heartbeat_key(epoch: int, rank: int) -> str:
    """Counts the signs of life of a rank."""
    return f'beat/{epoch}/{rank}'


class Rendezvous:
    """One process of the job, in the store where it meets the others.

    Args:
        store: outlives the workers; used by one thread at a time.
        rank: of this process.
        world_size: number of processes that must come.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.life = secrets.token_hex(8)
        self._joined: set[int] = set()

    def predecessor_took_part(self) -> bool:
        """True if an earlier process of this rank is in the present epoch, which then is broken."""
        epoch = present_epoch(self.store)
        place = _place(epoch, self.rank)
        if not self.store.check([place]) or self._is_mine(self.store.get(place)):
            return False
        break_epoch(self.store, epoch, f'rank {self.rank} was started again')
        return True

    def meet(
        self, report: Callable[[], bytes], timeout: timedelta, after: int | None = None
    ) -> Meeting:
        """Join the present epoch, or the first one that lasts, and wait for all ranks.

        Args:
            report: asked for anew in each epoch that is tried.
            timeout: how long to wait for the last rank.
            after: number of the epoch that this process comes from, which must be over.

        Raises:
            FencedOut: this process was in an earlier epoch and has been replaced since.
            SparseCheckpointError: some ranks did not come in time; names them.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            epoch = present_epoch(self.store)
            if after is not None and epoch <= after:
                break_epoch(self.store, after, f'rank {self.rank} left')
                continue
            if not self._join(epoch, report(), survivor=after is not None):
                break_epoch(self.store, epoch, f'rank {self.rank} was started again')
                continue
            if self._wait_for_all(epoch, deadline):
                self._forget_before(epoch)
                return self._meeting(epoch)

    def barrier(self, meeting: Meeting, name: str, timeout: timedelta) -> None:
        """Wait until all ranks of the epoch have come here.

        Raises:
            EpochBroken: a failure was announced meanwhile.
            SparseCheckpointError: some ranks did not come in time.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        barrier = f'epoch/{meeting.epoch}/barrier/{name}'
        self._count(barrier, f'{barrier}/all')
        if not self._poll(meeting.epoch, f'{barrier}/all', deadline):
            raise EpochBroken(why_broken(self.store, meeting.epoch) or 'unknown')

    def _join(self, epoch: int, report: bytes, survivor: bool) -> bool:
        """Take this rank's place; False if a dead predecessor has it."""
        place = _place(epoch, self.rank)
        mine = self.life.encode() + _SEPARATOR + report
        found = self.store.compare_set(place, '', mine)  # type: ignore[arg-type]
        if found == mine:
            if epoch not in self._joined:
                self._joined.add(epoch)
                self.store.append(f'here/{epoch}', f'{self.rank},')  # type: ignore[attr-defined]
                self._count(f'joined/{epoch}', f'full/{epoch}')
            return True
        if survivor and not self._is_mine(found):
            raise FencedOut(f'rank {self.rank} was replaced by another process; this one ends')
        return False

    def _wait_for_all(self, epoch: int, deadline: float) -> bool:
        """False if the epoch was broken before everybody was there and alive."""
        if not self._poll(epoch, f'full/{epoch}', deadline):
            return False
        self._count(
            f'alive/{epoch}', f'met/{epoch}'
        )  # a place may be that of a rank that died waiting
        return self._poll(epoch, f'met/{epoch}', deadline)

    def _count(self, counter: str, complete: str) -> None:
        if self.store.add(counter, 1) == self.world_size:
            self.store.set(complete, '1')

    def _poll(self, epoch: int, key: str, deadline: float) -> bool:
        """Wait for `key`; False if the epoch is over."""
        delay = _FIRST_POLL_SECONDS
        while not self.store.check([key]):
            if present_epoch(self.store) != epoch:
                return False
            if self.store.check([_broken(epoch)]):
                break_epoch(self.store, epoch, '')  # whoever began to may have died half-way
                return False
            if time.monotonic() > deadline:
                raise SparseCheckpointError(self._missing(epoch))
            time.sleep(delay)
            delay = min(2 * delay, _LAST_POLL_SECONDS)
        return True

    def _forget_before(self, epoch: int) -> None:
        """Delete the keys of epochs that nobody looks at any more.

        All have met, so that none waits in an earlier epoch; threads that watched the last one may
        not have ended yet.
        """
        if self.rank == 0:
            for key in self.store.list_keys():
                found = _OF_AN_EPOCH.fullmatch(key)
                if found and int(found[1]) < epoch - 1:
                    self.store.delete_key(key)

    def _missing(self, epoch: int) -> str:
        missing = _absent_in(self.store, epoch, self.world_size)
        return (
            f'Ranks {missing[:8] or "that had joined"} did not come in time. See the log of their '
            'node; --distributed-timeout-minutes sets the time.'
        )

    def _meeting(self, epoch: int) -> Meeting:
        places = [_place(epoch, rank) for rank in range(self.world_size)]
        found = self.store.multi_get(places)
        reports = [bytes(item).partition(_SEPARATOR)[2] for item in found]
        return Meeting(epoch, PrefixStore(f'epoch/{epoch}', self.store), reports)

    def _is_mine(self, place: bytes) -> bool:
        return bytes(place).partition(_SEPARATOR)[0] == self.life.encode()


def _place(epoch: int, rank: int) -> str:
    return f'join/{epoch}/{rank}'


def _absent_in(store: Store, epoch: int, world_size: int) -> list[int]:
    key = f'here/{epoch}'
    here = store.get(key).decode() if store.check([key]) else ''
    return sorted(set(range(world_size)) - {int(rank) for rank in here.split(',') if rank})


def _how_broken(store: Store, epoch: int) -> tuple[str, str] | None:
    """When and why, as they were announced."""
    if not store.check([_broken(epoch)]):
        return None
    since, _, reason = store.get(_broken(epoch)).decode().partition(' ')
    return since, reason


def _broken(epoch: int) -> str:
    return f'broken/{epoch}'
