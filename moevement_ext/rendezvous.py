# SPDX-License-Identifier: Apache-2.0
"""All ranks of a job meet, again after every failure, in a store that outlives them.

The launcher's store keeps what dead workers wrote. An *epoch* is a set of processes, one per rank,
that met under a number nobody used before; process groups are built under its name. Epochs end when
somebody breaks them: a rank that lost a peer, the launcher that saw a worker die, a rank whose
neighbour no longer beats, or a new process that finds its own predecessor in the epoch. To break an
epoch is the agreed verdict that a failure happened: everybody then joins the next one with a report
of what it still has, and a rank that does not join is gone.

Keys: `epoch` (the present number), `broken/<e>` (when and why it ended), `join/<e>/<rank>` (life,
report), `joined/<e>` and `alive/<e>` (counts), `full/<e>` and `met/<e>` (all have come; all have
answered).
"""

import os
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


def absent(store: Store, world_size: int) -> list[int]:
    """Ranks that have not joined the present epoch."""
    epoch = present_epoch(store)
    return [rank for rank in range(world_size) if not store.check([_place(epoch, rank)])]


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
                return self._meeting(epoch)

    def barrier(self, meeting: Meeting, name: str, timeout: timedelta) -> None:
        """Wait until all ranks of the epoch have come here.

        Raises:
            EpochBroken: a failure was announced meanwhile.
            SparseCheckpointError: some ranks did not come in time.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        self._count(meeting.epoch, name, f'{name}-all')
        if not self._poll(meeting.epoch, f'{name}-all/{meeting.epoch}', deadline):
            raise EpochBroken(why_broken(self.store, meeting.epoch) or 'unknown')

    def _join(self, epoch: int, report: bytes, survivor: bool) -> bool:
        """Take this rank's place; False if a dead predecessor has it."""
        place = _place(epoch, self.rank)
        mine = self.life.encode() + _SEPARATOR + report
        found = self.store.compare_set(place, '', mine)  # type: ignore[arg-type]
        if found == mine:
            if epoch not in self._joined:
                self._joined.add(epoch)
                self._count(epoch, 'joined', 'full')
            return True
        if survivor and not self._is_mine(found):
            raise FencedOut(f'rank {self.rank} was replaced by another process; this one ends')
        return False

    def _wait_for_all(self, epoch: int, deadline: float) -> bool:
        """False if the epoch was broken before everybody was there and alive."""
        if not self._poll(epoch, f'full/{epoch}', deadline):
            return False
        self._count(epoch, 'alive', 'met')  # a place may be that of a rank that died waiting
        return self._poll(epoch, f'met/{epoch}', deadline)

    def _count(self, epoch: int, name: str, complete: str) -> None:
        if self.store.add(f'{name}/{epoch}', 1) == self.world_size:
            self.store.set(f'{complete}/{epoch}', '1')

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

    def _missing(self, epoch: int) -> str:
        missing = [r for r in range(self.world_size) if not self.store.check([_place(epoch, r)])]
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


def _how_broken(store: Store, epoch: int) -> tuple[str, str] | None:
    """When and why, as they were announced."""
    if not store.check([_broken(epoch)]):
        return None
    since, _, reason = store.get(_broken(epoch)).decode().partition(' ')
    return since, reason


def _broken(epoch: int) -> str:
    return f'broken/{epoch}'
