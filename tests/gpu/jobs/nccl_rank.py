# SPDX-License-Identifier: Apache-2.0
"""One rank of the trials of `tests.gpu.jobs.nccl`: a process that is killed, or survives.

Started as `python -m tests.gpu.jobs.nccl_rank <a Trial as JSON>`.
"""

import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _world

from moevement_ext.regroup import nccl_environment
from moevement_ext.regroup.interruptible_store import InterruptibleStore
from moevement_ext.regroup.process_groups import ProcessGroups, stand_in_for
from moevement_ext.system.leaving import leave

_WAIT = timedelta(seconds=60)
# Limit of a collective.
_TIMEOUT = timedelta(minutes=3)
# Time for which survivors wait for the dead rank before they are unblocked.
_BLOCKED_S = 1.0
# Time within which NCCL notices a closed connection.
_NOTICED_S = 5.0
_POLL_S = 0.05
# Time within which threads of replaced groups end; watchdogs look every 0.1 s.
_SETTLED_S = 2.0
_UNCHANGED_S = 0.3
_ELEMENTS = 1 << 20
_MIB = 1 << 20


class Trial(msgspec.Struct, frozen=True):
    backend: str
    rank: int
    ranks: int
    port: int
    """TCP port of the store."""
    cycle: int
    """First cycle of the process; above 0 it replaces a killed process."""
    repair: bool
    """False: groups of calls that an exception has left open stay open."""


class Measured(msgspec.Struct, frozen=True):
    cycle: int
    rank: int
    pid: int
    ended_by: str
    """Error that ended the operation in which the survivor waited."""
    first_send: str
    """Result of a send to a neighbour after NCCL noticed the death, before ranks were unblocked."""
    next_send: str
    """Result of the next send, before groups were reconnected."""
    left_open: int
    """Number of coalescing regions that the sends left open."""
    unblock_s: float
    renew_s: float
    resources: dict[str, float]


class Rank:
    """The groups of a rank, as parallel training creates them, and their use."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._gpu = trial.backend == nccl_environment.BACKEND
        self._device = torch.device('cuda:0' if self._gpu else 'cpu')
        self._store = TCPStore('127.0.0.1', trial.port, is_master=False, timeout=_WAIT)
        self._make_groups()
        self._process_groups = ProcessGroups(trial.backend, _TIMEOUT)

    def _make_groups(self) -> None:
        trial, everybody = self._trial, list(range(self._trial.ranks))
        made: dict[str, Any] = {'rank': trial.rank, 'world_size': trial.ranks}
        backend = trial.backend
        if trial.cycle:
            stand_in_for(backend)
            from torch.testing._internal.distributed.fake_pg import FakeStore

            backend = 'fake'
            dist.init_process_group(backend, store=FakeStore(), **made)
        else:
            first = PrefixStore('first', self._store)
            dist.init_process_group(backend, store=first, timeout=_TIMEOUT, **made)
        lists = [everybody, everybody, [0, 1], everybody[-2:], *([rank] for rank in everybody)]
        groups: list[Any] = [(ranks, dist.new_group(ranks, backend=backend)) for ranks in lists]
        self._groups: list[Any] = [dist.group.WORLD]
        self._groups += [group for ranks, group in groups if trial.rank in ranks]
        self._data_parallel, self._pipeline = groups[0][1], groups[1][1]

    def run(self) -> None:
        cycle = self._trial.cycle
        if cycle:
            self._renew(cycle - 1)
            self._store.set(f'renewed/{cycle - 1}/{self._trial.rank}', '')
        else:
            self._check()
        while (victim := self._next_victim(cycle)) >= 0:
            if victim == self._trial.rank:
                time.sleep(_TIMEOUT.total_seconds())  # until the parent kills it
            self._survive(cycle, victim)
            cycle += 1

    def _next_victim(self, cycle: int) -> int:
        self._store.set(f'ready/{cycle}/{self._trial.rank}', '')
        return int(self._store.get(f'victim/{cycle}'))

    def _survive(self, cycle: int, victim: int) -> None:
        self._store.wait([f'killed/{cycle}'], _WAIT)
        first_send = self._send_until_refused()
        self._process_groups.end_calls()
        ended_by, unblock_s = self._wait_for_the_dead()
        next_send = self._outcome(self._ring)
        left_open = len(_world.pg_coalesce_state)
        # The measured time excludes the start of the replacement.
        self._store.wait([f'renewing/{cycle}/{victim}'], _WAIT)
        measured = Measured(
            cycle=cycle,
            rank=self._trial.rank,
            pid=os.getpid(),
            ended_by=ended_by,
            first_send=first_send,
            next_send=next_send,
            left_open=left_open,
            unblock_s=unblock_s,
            renew_s=self._renew(cycle),
            resources=self._settled_resources(),
        )
        self._store.set(
            f'measured/{cycle}/{self._trial.rank}', msgspec.json.encode(measured).decode()
        )
        self._store.set(f'renewed/{cycle}/{self._trial.rank}', '')

    def _send_until_refused(self) -> str:
        """Result of a send once NCCL knows of the death; until then sends are queued."""
        deadline = time.monotonic() + _NOTICED_S
        while time.monotonic() < deadline:
            try:
                self._ring()
            except Exception as error:  # from torch or NCCL
                return _one_line(error)
            time.sleep(_POLL_S)
        return 'queued'

    def _wait_for_the_dead(self) -> tuple[str, float]:
        """Errors that ended two operations in different groups, and the time to end them."""
        taken = []

        def unblock() -> None:
            time.sleep(_BLOCKED_S)
            began = time.monotonic()
            self._process_groups.unblock()
            taken.append(time.monotonic() - began)

        def wait() -> None:
            tensor = torch.ones(_ELEMENTS, device=self._device)
            dist.all_reduce(tensor, async_op=True)
            work = dist.all_reduce(tensor.clone(), group=self._data_parallel, async_op=True)
            if work is not None and not self._gpu:
                work.wait()
            tensor.sum().item()

        thread = threading.Thread(target=unblock)
        thread.start()
        ended_by = self._outcome(wait)
        thread.join()
        return ended_by, taken[0]

    def _outcome(self, work: Any) -> str:
        try:
            work()
            self._synchronize()
        except Exception as error:  # torch raises various errors for an ended connection
            return _one_line(error)
        return 'returned'

    def _renew(self, cycle: int) -> float:
        """Reconnect all groups and check them; returns the seconds."""
        self._store.set(f'renewing/{cycle}/{self._trial.rank}', '')
        began = time.monotonic()
        prefix = PrefixStore(f'round{cycle}', self._store)
        store = InterruptibleStore(prefix, threading.Event(), _WAIT)
        self._process_groups.renew(store, None, _WAIT)
        self._synchronize()
        seconds = time.monotonic() - began
        self._check()
        return seconds

    def _check(self) -> None:
        """Check the reductions and sends of all groups.

        Raises:
            ValueError: a group returned a wrong result.
        """
        for number, group in enumerate(self._groups):
            ranks = dist.get_process_group_ranks(group)
            tensor = torch.full((_ELEMENTS,), float(self._trial.rank + 1), device=self._device)
            dist.all_reduce(tensor, group=group)
            expected = float(sum(rank + 1 for rank in ranks))
            if not bool((tensor == expected).all()):
                raise ValueError(f'group {number}: sum {tensor[0].item()} is not {expected}')
        received = self._ring()
        expected = float((self._trial.rank - 1) % self._trial.ranks)
        if not bool((received == expected).all()):
            raise ValueError(f'received {received[0].item()} instead of {expected}')

    def _ring(self) -> torch.Tensor:
        """Receive from the previous rank while sending to the next one, as a pipeline does."""
        trial = self._trial
        sent = torch.full((_ELEMENTS,), float(trial.rank), device=self._device)
        received = torch.zeros(_ELEMENTS, device=self._device)
        after, before = (trial.rank + 1) % trial.ranks, (trial.rank - 1) % trial.ranks
        operations = [
            dist.P2POp(dist.isend, sent, after, self._pipeline),
            dist.P2POp(dist.irecv, received, before, self._pipeline),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    def _synchronize(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()

    def _settled_resources(self) -> dict[str, float]:
        """Resources once the replaced groups have released theirs, or after a while."""
        self._process_groups.await_destruction()
        deadline = time.monotonic() + _SETTLED_S
        before: dict[str, float] = {}
        while (now := self._resources())['threads'] != before.get('threads'):
            if time.monotonic() > deadline:
                break
            before = now
            time.sleep(_UNCHANGED_S)
        return now

    def _resources(self) -> dict[str, float]:
        process = psutil.Process()
        free, total = torch.cuda.mem_get_info() if self._gpu else (0, 0)
        return {
            'descriptors': process.num_fds(),
            'threads': process.num_threads(),
            'memory_mib': process.memory_info().rss / _MIB,
            'gpu_used_mib': (total - free) / _MIB,  # used by all ranks
        }

    def failed(self, error: Exception) -> None:
        self._store.set(f'failed/{self._trial.rank}', f'{type(error).__name__}: {error}')


def _one_line(error: Exception) -> str:
    return f'{type(error).__name__}: {str(error).splitlines()[0][-80:]}'


def main(text: str) -> None:
    trial = msgspec.json.decode(text, type=Trial)
    if trial.backend == nccl_environment.BACKEND:
        nccl_environment.prepare()
    if not trial.repair:
        from moevement_ext.regroup.nccl import Nccl

        Nccl.end_calls = lambda self: None  # type: ignore[method-assign]
    torch.set_num_threads(1)
    rank = Rank(trial)
    try:
        rank.run()
    except Exception as error:
        rank.failed(error)
        raise
    leave(0)


if __name__ == '__main__':
    main(sys.argv[1])
