# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job without training: they meet, watch, fail and decide as real ones do.

All of `moevement_ext.membership` is real, and so are what ranks say of their windows, the store and
its connections, which count what goes through them. Process groups and windows are not: nobody
computes or captures. Each rank is a thread, beside the threads that every rank has.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
from torch.distributed import Store, TCPStore

from moevement_ext.membership.brought import packed_together
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.node_copy import NodeCopy
from moevement_ext.membership.rendezvous import Rendezvous
from moevement_ext.membership.report import Report, encode
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.window.name import HeldWindow, Window, WindowName
from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.plan.replanning import WindowLoad
from moevement_ext.protect.persistence import PersistenceBoard
from moevement_ext.protect.replanner import Replanner
from moevement_ext.protect.stage_plan import StagePlan
from moevement_ext.recover.verdict import Localized, decide_recovery
from tools.lab.errors import LabError

RANKS_PER_NODE = 8
STAGES = 8
REPLICAS = 2
WINDOW = 4
HANG_TIMEOUT_S = 60.0
"""The default of `--sparse-ckpt-hang-timeout`."""
_TIMEOUT = timedelta(minutes=10)
_LAST_ITERATION = 1_000_000
_TOKENS = {f'layer{layer}.expert{expert}': 4096 for layer in range(4) for expert in range(4)}
"""That a rank has seen of its experts."""


class Traffic(msgspec.Struct, frozen=True):
    """What went from some ranks to the store and back."""

    requests: int = 0
    nbytes: int = 0
    """Bytes of keys and values, both ways."""
    largest: int = 0
    """Bytes of the largest value since the start."""

    def __add__(self, other: 'Traffic') -> 'Traffic':
        largest = max(self.largest, other.largest)
        return Traffic(self.requests + other.requests, self.nbytes + other.nbytes, largest)

    def since(self, before: 'Traffic') -> 'Traffic':
        """Without what was before."""
        return Traffic(self.requests - before.requests, self.nbytes - before.nbytes, self.largest)


class Tally:
    """Counts for all connections of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traffic = Traffic()
        self.connections: list[Store] = []
        """All there were: torch keeps only the part of a store that is not Python."""

    def add(self, requests: int, keys: Sequence[str | bytes], values: Sequence[bytes] = ()) -> None:
        """Note what one call has sent and received."""
        nbytes = sum(map(len, keys)) + sum(map(len, values))
        more = Traffic(requests, nbytes, max(map(len, values), default=0))
        with self._lock:
            self._traffic += more

    def read(self) -> Traffic:
        """Until now."""
        with self._lock:
            return self._traffic


class CountedStore(Store):
    """A connection to the store of the launcher that counts.

    Counted are the requests that torch 2.15 sends: to read a value is to wait for it first.
    """

    def __init__(self, store: Store, tally: Tally) -> None:
        super().__init__()
        self._store = store
        self._tally = tally
        tally.connections.append(self)

    def clone(self) -> 'CountedStore':
        """Another connection."""
        return CountedStore(self._store.clone(), self._tally)

    def set(self, key: str, value: Any) -> None:
        """Set a value."""
        self._tally.add(1, [key], [_bytes(value)])
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        value = self._store.get(key)
        self._tally.add(2, [key, key], [value])
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several."""
        values = self._store.multi_get(keys)
        self._tally.add(2, keys + keys, values)
        return values

    def add(self, key: str, value: int) -> int:
        """Add to a counter."""
        self._tally.add(1, [key])
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """True if all keys are there."""
        self._tally.add(1, keys)
        return self._store.check(keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Replace what is expected; what is there then."""
        found = self._store.compare_set(key, expected, desired)
        self._tally.add(1, [key], [_bytes(expected), _bytes(desired), found])
        return found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        self._tally.add(1, keys)
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        self._tally.add(1, [key])
        return self._store.delete_key(key)

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - a `PrefixStore` calls it by this name
        """Remove a key."""
        return self.delete_key(key)

    def list_keys(self) -> list[str]:
        """All keys."""
        keys = self._store.list_keys()
        self._tally.add(1, keys)
        return keys

    def has_extended_api(self) -> bool:
        """Several keys can be asked for at once."""
        return True


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


class _NoGroups:
    """In the place of the process groups of a rank that trains."""

    waits_returned = False

    def end_calls(self) -> None:
        """None was cut off."""

    def unblock(self) -> None:
        """Nobody waits in one."""

    def check_device(self) -> None:
        """There is none."""


class Member(Membership):
    """A rank, from its start on."""

    def __init__(self, store: Store, rank: int, world_size: int, memory: Path) -> None:
        self.rank = rank
        self.broke = threading.Event()
        rendezvous = Rendezvous(store, rank, world_size, NodeCopy(memory, memory / _node(rank)))
        super().__init__(rendezvous, _TIMEOUT, HANG_TIMEOUT_S, lambda: newcomer(rank))
        self._groups = cast(Any, _NoGroups())
        self._board = PersistenceBoard(self.archive, rank, world_size, lambda agreed: None)
        present = StagePlan(0, self.origin, WindowPlan(((),) * WINDOW), 'plan', {})
        self._replanner = Replanner(
            self.archive,
            rank,
            world_size,
            present,
            lambda plan, loads: None,
            lambda version, store: None,
            lambda plan: None,
        )

    def train(self) -> None:
        """Watch the epoch from now on."""
        self.broke.clear()
        self.watch('gloo', self.broke.set)

    def end_window(self, start: int) -> None:
        """All of a window is with its holders."""
        self._board.report(WindowName(start, 'plan'))
        self._replanner.observe(WindowLoad(start, _TOKENS, 5.0, 1e9))

    def die(self) -> None:
        """Without a word."""
        self._watch.stop()
        self._board.stop()
        self._replanner.stop()

    def watches_no_more(self) -> None:
        """Once the epoch of one that died is over."""
        self._watch.join()
        self._rendezvous.finish()


@dataclass(frozen=True)
class Layout:
    """The layout of the job, the same for all ranks."""

    world_size: int

    @property
    def stage_of(self) -> list[int]:
        """By rank."""
        return [rank * STAGES // self.world_size for rank in range(self.world_size)]

    def report(self, rank: int, origin: int, committed: int) -> Report:
        """What a survivor reports whose node holds windows of its ranks and replicas of others."""
        newest = committed - committed % WINDOW
        first = rank - rank % RANKS_PER_NODE
        distances = [node * RANKS_PER_NODE for node in range(REPLICAS + 1)]
        owners = [
            (first + distance + local) % self.world_size
            for distance in distances
            for local in range(RANKS_PER_NODE)
        ]
        windows = [
            HeldWindow(Window(WindowName(start, 'plan'), WINDOW), owner)
            for start in (newest - 2 * WINDOW, newest - WINDOW)
            for owner in owners
        ]
        ledger = [
            LedgerEntry(t, [1.0 / t], [False], 8, 512 * t)
            for t in range(newest - 2 * WINDOW, committed + 1)
        ]
        return Report(
            survivor=True,
            node=_node(rank),
            pid=10_000 + rank,
            windows=windows,
            origin=origin,
            committed=committed,
            clean_at=committed,
            first_logged=newest - 2 * WINDOW,
            address=(f'10.0.{rank // 256}.{rank % 256}', 20_000 + rank),
            ledger=ledger,
            details=b'plan and trainer' * 8,
        )


def packed_bytes(world_size: int) -> int:
    """Bytes of what all ranks of a job have brought to a meeting, as they are read there."""
    layout = Layout(world_size)
    return len(packed_together([encode(layout.report(rank, 0, 41)) for rank in range(world_size)]))


def newcomer(rank: int) -> Report:
    """What a new process brings."""
    return Report(survivor=False, node=_node(rank), pid=10_000 + rank, windows=[])


def _node(rank: int) -> str:
    return f'node{rank // RANKS_PER_NODE}'


class Ranks:
    """Those of one process.

    Args:
        ports: where the ranks of each node reach the store.
        memory: directory for the memory of all nodes.
        world_size: number of all ranks.
        ranks: these.
    """

    def __init__(
        self, ports: Sequence[int], memory: Path, world_size: int, ranks: Sequence[int]
    ) -> None:
        self.tally = Tally()
        self._ports = ports
        self._memory = memory
        self._layout = Layout(world_size)
        self._ranks = ranks
        self._members: dict[int, Member] = {}
        self._committed = 10 * WINDOW + 1
        self._lock = threading.Lock()
        self._threads = {rank: ThreadPoolExecutor(1) for rank in ranks}
        """The training thread of each rank."""

    def start(self) -> float:
        """All meet; when the last has."""
        self._each(self._begin)
        return time.monotonic()

    def iterate(self) -> None:
        """All commit an iteration."""
        self._committed += 1
        for member in self._members.values():
            member.committed = self._committed
            if self._committed % WINDOW == 0:
                member.end_window(self._committed - WINDOW)

    def fail(self, victim: int) -> tuple[float, float]:
        """One rank dies and is replaced at once; when all had a verdict, and when they went on."""
        if victim in self._ranks:
            self._members.pop(victim).die()
        verdicts: list[float] = []

        def go_on(rank: int) -> None:
            member = self._members.get(rank)
            if member is None:
                member = self._begin(rank)
            else:
                member.broke.wait()
                member.leave('a peer was lost')
                origin, committed = member.origin, self._committed
                member.meet(lambda: self._layout.report(rank, origin, committed))
            self._decide(member, victim)
            verdicts.append(time.monotonic())
            member.train()
            member.barrier('ready')
            member.barrier('replayed')

        self._each(go_on)
        return max(verdicts), time.monotonic()

    def end(self) -> None:
        """All threads end once the epoch is broken."""
        for member in self._members.values():
            member.die()

    def join(self) -> None:
        """Wait for them."""
        for member in self._members.values():
            member.watches_no_more()

    def _begin(self, rank: int) -> Member:
        port = self._ports[rank // RANKS_PER_NODE]
        store = TCPStore('localhost', port, is_master=False, timeout=_TIMEOUT)
        counted = CountedStore(store, self.tally)
        member = Member(counted, rank, self._layout.world_size, self._memory)
        member.settle()
        with self._lock:
            self._members[rank] = member
        if not member.joining:
            member.train()
        return member

    def _decide(self, member: Member, victim: int) -> None:
        verdict = decide_recovery(member.reports, self._layout.stage_of, (), _LAST_ITERATION)
        if not isinstance(verdict, Localized) or verdict.replacements != {victim}:
            raise LabError(f'rank {member.rank}: {verdict}')

    def _each(self, what: Callable[[int], Any]) -> None:
        done = [thread.submit(what, rank) for rank, thread in self._threads.items()]
        for future in done:
            future.result()
