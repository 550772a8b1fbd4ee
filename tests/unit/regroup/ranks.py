# SPDX-License-Identifier: Apache-2.0
"""Real ranks of a small job, one process each, that do what a test tells them; and what they do."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import combinations
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, TCPStore

from megatron.moevement.seams import cpu_device
from moevement_ext.regroup.interruptible_store import InterruptibleStore
from moevement_ext.regroup.process_groups import ProcessGroups, stand_in_for
from tests.distributed.harness import nccl_like
from tests.support.forks import context

DEADLINE = timedelta(seconds=50)
"""For what takes well under a second; a half of it is less than gloo's 30 s to connect."""
OPERATION_TIMEOUT = timedelta(seconds=77)
"""Of the process groups; nothing may wait for it."""


class Failed(Exception):
    """A rank raised; the message begins with the name of the error."""


class Job(NamedTuple):
    rank: int
    size: int
    store: TCPStore
    groups: dict[str, ProcessGroup]
    """As made at first; nothing here ever replaces them."""
    process_groups: ProcessGroups
    backend: str


class Rank:
    def __init__(self, rank: int, size: int, port: int, fake: bool, backend: str) -> None:
        forked = context()
        self._pipe, theirs = forked.Pipe()
        self._process = forked.Process(
            target=_serve, args=(rank, size, port, fake, backend, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe.send((function, args))

    def result(self) -> Any:
        """Of what was started.

        Raises:
            Failed: it raised, or died.
        """
        assert self._pipe.poll(DEADLINE.total_seconds()), 'the rank hangs'
        try:
            raised, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise Failed(f'died with exit code {self._process.exitcode}') from None
        if raised:
            raise Failed(value)
        return value

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.start(function, *args)
        return self.result()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


class Cluster:
    """All ranks of a job, and the store that outlives them."""

    def __init__(self, size: int, backend: str) -> None:
        self.size = size
        self.backend = backend
        self.store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
        self.ranks = [self._start(rank, fake=False) for rank in range(size)]
        self._round = 0

    def replace(self, rank: int) -> None:
        """Start a new process in the place of a dead one; its groups are fake."""
        self.ranks[rank] = self._start(rank, fake=True)

    def _start(self, rank: int, fake: bool) -> Rank:
        return Rank(rank, self.size, self.store.port, fake, self.backend)

    def all(self, function: Callable[..., Any], *args: Any, ranks: Any = None) -> list[Any]:
        chosen = self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]
        for rank in chosen:
            rank.start(function, *args)
        return [rank.result() for rank in chosen]

    def fresh_prefix(self) -> str:
        self._round += 1
        return f'round{self._round}'

    def renew(self, members: Any = None) -> None:
        self.all(renew, self.fresh_prefix(), members, ranks=members)


@contextmanager
def cluster(size: int, backend: str = 'gloo', used: bool = True) -> Iterator[Cluster]:
    """With backend 'nccl' the processes have one that fails like it, for tensors on the CPU.

    All groups are used at first, unless it is said otherwise.
    """
    made = Cluster(size, backend)
    try:
        if used:
            made.all(collectives)
        yield made
    finally:
        for rank in made.ranks:
            rank.kill()


def _serve(rank: int, size: int, port: int, fake: bool, backend: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if backend == 'nccl':
        cpu_device.install()
        nccl_like.install()
    store = TCPStore('127.0.0.1', port, is_master=False)
    _initialize(rank, size, store, fake, backend)
    groups = _new_groups(rank, size)
    job = Job(rank, size, store, groups, ProcessGroups(backend, OPERATION_TIMEOUT), backend)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, function(job, *args)))
        except Exception as error:
            pipe.send((True, f'{type(error).__name__}: {error}'))


def _initialize(rank: int, size: int, store: TCPStore, fake: bool, backend: str) -> None:
    if not fake:
        dist.init_process_group(
            backend,
            timeout=OPERATION_TIMEOUT,
            store=PrefixStore('start', store),
            rank=rank,
            world_size=size,
        )
        return
    stand_in_for(backend)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group('fake', store=FakeStore(), rank=rank, world_size=size)


def _new_groups(rank: int, size: int) -> dict[str, ProcessGroup]:
    """The world, all ranks once more, all pairs, and each alone; those with this rank."""
    groups = {'world': dist.group.WORLD, 'all': dist.new_group(timeout=OPERATION_TIMEOUT)}
    lists = [*combinations(range(size), 2), *((other,) for other in range(size))]
    for ranks in lists:
        group = dist.new_group(list(ranks), timeout=OPERATION_TIMEOUT)
        if rank in ranks:
            groups[','.join(map(str, ranks))] = group
    return groups  # type: ignore[return-value]


# ---- what ranks are told to do


def renew(job: Job, prefix: str, members: Any = None, seconds: float = 45, kept: Any = ()) -> None:
    timeout = timedelta(seconds=seconds)
    store = InterruptibleStore(PrefixStore(prefix, job.store), threading.Event(), timeout)
    job.process_groups.renew(store, members, timeout, kept)


def unblock(job: Job) -> None:
    job.process_groups.unblock()


def all_reduce(job: Job, group: str) -> float:
    tensor = torch.tensor([job.rank + 1.0])
    dist.all_reduce(tensor, group=job.groups[group])
    return tensor.item()


def end_by_unblocking(job: Job, operation: str, peer: int) -> None:
    """Get a thread out of an operation that ``peer`` never enters.

    Raises:
        TimeoutError: it is still waiting.
    """
    tensor = torch.zeros(1)
    # Posted here, so that it is pending for certain when the other thread waits for it.
    work = {
        'recv': lambda: dist.irecv(tensor, peer),
        'all_reduce': lambda: dist.all_reduce(tensor, async_op=True),
        'barrier': lambda: dist.barrier(async_op=True),
        'all_gather': lambda: dist.all_gather_into_tensor(
            torch.zeros(2), tensor, group=job.groups[f'{job.rank},{peer}'], async_op=True
        ),
    }[operation]()
    assert work is not None and not work.is_completed()
    errors: list[str] = []
    waiting = threading.Thread(target=_collect_error, args=(work.wait, errors), daemon=True)
    waiting.start()
    job.process_groups.unblock()
    waiting.join(DEADLINE.total_seconds() / 2)
    if waiting.is_alive():
        raise TimeoutError(operation)
    assert len(errors) == 1, f'{operation} returned'


def errors_of_operations(job: Job) -> list[str]:
    """What each group with a peer says when it is used."""
    errors: list[str] = []
    for name, group in job.groups.items():
        ranks = dist.get_process_group_ranks(group)
        for peer in ranks:
            if peer != job.rank:
                tensor = torch.zeros(1)
                operations: list[Callable[[], Any]] = [
                    lambda: dist.all_reduce(tensor, group=group),  # noqa: B023
                    lambda: dist.send(tensor, peer, group),  # noqa: B023
                    lambda: dist.recv(tensor, peer, group),  # noqa: B023
                    lambda: dist.barrier(group),  # noqa: B023
                ]
                for operation in operations:
                    before = len(errors)
                    _collect_error(operation, errors)
                    assert len(errors) > before, f'group {name}, peer {peer}: no error'
    return errors


def _collect_error(function: Callable[[], object], errors: list[str]) -> None:
    try:
        function()
    except RuntimeError as error:
        errors.append(str(error))


def backends(job: Job) -> dict[str, tuple[str, str, str]]:
    """By group, as torch's tables have it and as the group has it."""
    from torch.distributed.distributed_c10d import _world

    return {
        name: (
            dist.get_backend(group),
            _world.pg_backend_config[group],
            type(group._get_backend(torch.device('cpu'))).__name__,
        )
        for name, group in job.groups.items()
    }


def operation_timeouts(job: Job) -> set[timedelta]:
    groups = job.groups.values()
    return {group._get_backend(torch.device('cpu')).options._timeout for group in groups}


def resources() -> dict[str, int]:
    process = psutil.Process()
    return {
        'file descriptors': process.num_fds(),
        'threads': process.num_threads(),
        'memory': process.memory_info().rss,
    }


def cycles(job: Job, prefix: str, count: int) -> dict[str, int]:
    """Unblock and renew again and again; what is in use afterwards."""
    for cycle in range(count):
        dist.barrier()
        unblock(job)
        renew(job, f'{prefix}.{cycle}')
        all_reduce(job, 'all')
    job.process_groups.await_destruction()
    return resources()


# ---- every collective, with exact results


def collectives(job: Job) -> None:
    """Run each in every group; only right results pass."""
    assert dist.group.WORLD is job.groups['world']
    for name, group in {**job.groups, 'None': None}.items():
        ranks = dist.get_process_group_ranks(group)
        assert name in ('world', 'all', 'None') or name == ','.join(map(str, ranks))
        assert dist.get_rank(group) == ranks.index(job.rank)
        assert dist.get_world_size(group) == len(ranks)
        assert dist.get_backend(group) == job.backend
        _check_reductions(ranks, job.rank, group)
        _check_exchanges(ranks, job.rank, group)
        _check_objects(ranks, job.rank, group)
        if len(ranks) > 1:
            _check_ring(ranks, job.rank, group)
        dist.barrier(group)


def _check_reductions(ranks: list[int], rank: int, group: ProcessGroup | None) -> None:
    mine = torch.tensor([rank + 1.0])
    dist.all_reduce(mine, group=group)
    assert mine.item() == sum(ranks) + len(ranks)
    parts = torch.arange(2.0 * len(ranks)) + rank
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, parts, group=group)
    first = 2 * ranks.index(rank)
    expected = [len(ranks) * (first + i) + sum(ranks) for i in range(2)]
    assert part.tolist() == expected


def _check_exchanges(ranks: list[int], rank: int, group: ProcessGroup | None) -> None:
    gathered = torch.empty(len(ranks))
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=group)
    assert gathered.tolist() == ranks
    received = torch.empty(len(ranks))
    sent = torch.tensor([100.0 * rank + other for other in ranks])
    dist.all_to_all_single(received, sent, group=group)
    assert received.tolist() == [100.0 * other + rank for other in ranks]
    told = torch.tensor([float(rank)])
    dist.broadcast(told, ranks[-1], group)
    assert told.item() == ranks[-1]


def _check_objects(ranks: list[int], rank: int, group: ProcessGroup | None) -> None:
    objects: list[Any] = [None] * len(ranks)
    dist.all_gather_object(objects, {'rank': rank}, group)
    assert objects == [{'rank': other} for other in ranks]


def _check_ring(ranks: list[int], rank: int, group: ProcessGroup | None) -> None:
    place = ranks.index(rank)
    after, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]
    sent, received = torch.tensor([float(rank)]), torch.empty(1)
    works = [dist.isend(sent, after, group), dist.irecv(received, before, group)]
    for work in works:
        assert work is not None
        work.wait()
    assert received.item() == before
    received.fill_(-1)
    operations = [
        dist.P2POp(dist.isend, sent, after, group),
        dist.P2POp(dist.irecv, received, before, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.item() == before
