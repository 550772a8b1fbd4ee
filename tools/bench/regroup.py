# SPDX-License-Identifier: Apache-2.0
"""Measures how fast process groups unblock and reconnect, and which resources they leak.

    moevement bench regroup --json regroup.json

Each cycle: all groups are used, every rank but one waits in an all-reduce, all ranks unblock, and
all groups are renewed in place. Resources are counted after a warm-up and at the end.

Exit status: 0 done, 1 a counted resource (all but memory) grew, 2 a process failed.
"""

import argparse
import multiprocessing
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed import PrefixStore, Store, TCPStore

from moevement_ext.regroup.interruptible_store import InterruptibleStore
from moevement_ext.regroup.process_groups import ProcessGroups

from ..lab.programs import LabError
from .frame import Bench, Figure, Report

_COUNTED = ('file_descriptors', 'threads', 'shm_files', 'store_keys')
_TIMEOUT = timedelta(seconds=60)
_SHM = '/dev/shm/'
_MIB = 1 << 20


class RankReport(NamedTuple):
    """Results of one process."""

    groups: int
    cycles: list[tuple[float, float]]
    """Seconds to leave the all-reduce, and to connect all groups."""
    growth: dict[str, float]


def _group_ranks(processes: int) -> list[list[int]]:
    """The world, and for each process 19 groups of the kinds that parallel training creates."""
    ranks = list(range(processes))
    half = processes // 2
    lists = 7 * [ranks]
    lists += 4 * [ranks[:half], ranks[half:]]
    lists += 4 * [ranks[::2], ranks[1::2]]
    return lists + 4 * [[rank] for rank in ranks]


class _Rank:
    """One process of the benchmark."""

    together: ClassVar[Any]
    """Barrier of all processes."""

    def __init__(self, args: argparse.Namespace, rank: int, port: int) -> None:
        torch.set_num_threads(1)
        self._args = args
        self._rank = rank
        self._store = TCPStore('127.0.0.1', port, is_master=False)
        first: Store = PrefixStore('start', self._store)
        dist.init_process_group('gloo', store=first, rank=rank, world_size=args.processes)
        made = [(ranks, dist.new_group(ranks)) for ranks in _group_ranks(args.processes)]
        self._groups: list[Any] = [dist.group.WORLD]
        self._groups += [group for ranks, group in made if rank in ranks]
        self._process_groups = ProcessGroups('gloo')

    def run(self) -> RankReport:
        for cycle in range(self._args.warm_up):
            self._cycle(cycle)
        before = self._resources()
        times = [self._cycle(self._args.warm_up + cycle) for cycle in range(self._args.cycles)]
        after = self._resources()
        growth = {name: after[name] - value for name, value in before.items()}
        return RankReport(len(self._groups), times, growth)

    def _cycle(self, cycle: int) -> tuple[float, float]:
        """Run one cycle; returns its two times."""
        tensor = torch.ones(1)
        for group in self._groups:
            dist.all_reduce(tensor, group=group)
        pending = dist.all_reduce(tensor, async_op=True) if self._rank else None
        self.together.wait()
        start = time.monotonic()
        self._process_groups.unblock()
        if pending is not None:
            _expect_error(pending)
        unblocked = time.monotonic()
        self.together.wait()
        renewing = time.monotonic()
        prefix = PrefixStore(f'cycle{cycle}', self._store)
        store = InterruptibleStore(prefix, threading.Event(), _TIMEOUT)
        self._process_groups.renew(store, None, _TIMEOUT)
        return unblocked - start, time.monotonic() - renewing

    def _resources(self) -> dict[str, float]:
        """Resources of this process; memory is resident, files of /dev/shm are mapped."""
        process = psutil.Process()
        self._process_groups.await_destruction()
        # No process is connecting: the counts of all ranks describe the same state.
        self.together.wait()
        taken = {
            'file_descriptors': process.num_fds(),
            'threads': process.num_threads(),
            'memory_mib': process.memory_info().rss / _MIB,
            'shm_files': sum(map.path.startswith(_SHM) for map in process.memory_maps()),
            'store_keys': self._store.num_keys(),
        }
        self.together.wait()
        return taken


def _expect_error(work: dist.Work) -> None:
    try:
        work.wait()
    except RuntimeError:
        return
    raise RuntimeError('an all-reduce that one rank never entered has returned')


def _prepare(barrier: Any) -> None:
    """Called first in each process: a barrier does not travel otherwise."""
    _Rank.together = barrier


def _serve(args: argparse.Namespace, port: int, rank: int) -> RankReport:
    try:
        return _Rank(args, rank, port).run()
    except Exception:
        traceback.print_exc()
        _Rank.together.abort()
        raise


def run_ranks(args: argparse.Namespace) -> list[RankReport]:
    """Run all processes. Raises LabError: one failed or died."""
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['torch.distributed'])
    barrier = context.Barrier(args.processes, timeout=_TIMEOUT.total_seconds())
    with ProcessPoolExecutor(args.processes, context, _prepare, (barrier,)) as pool:
        try:
            return list(pool.map(partial(_serve, args, store.port), range(args.processes)))
        except Exception as error:
            raise LabError(f'a process failed: {error!r}') from error


class RegroupBench(Bench):
    """Cycles of all processes; of each the slowest process counts."""

    PROG, ROUNDS = 'moevement bench regroup', 0
    TITLES = {'unblock': 'unblock', 'renew': 'renew'}
    FIGURES = {'seconds': Figure('seconds', '.4f', lambda seconds, _: seconds)}

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        if args.processes < 2 or args.processes % 2:
            parser.error(f'--processes {args.processes}: must be even and at least 2')

    def __init__(self, args: argparse.Namespace, output: Path, data: Path) -> None:
        super().__init__(args, output, data)
        self._ranks = run_ranks(args)

    def take_turns(self, console: Console) -> list[dict[str, float]]:
        times = zip(*(rank.cycles for rank in self._ranks), strict=True)
        return [dict(zip(self.TITLES, map(max, *cycle), strict=True)) for cycle in times]

    def _growth(self) -> dict[str, float]:
        growth = [rank.growth for rank in self._ranks]
        return {name: max(one[name] for one in growth) for name in growth[0]}

    def different(self, rounds: Sequence[Mapping[str, float]]) -> list[str]:
        return [name for name in _COUNTED if self._growth()[name] > 0]

    def notes(self, report: Report) -> Iterator[str]:
        yield (
            f'{self.args.processes} processes with {self._ranks[0].groups} groups each, '
            f'{self.args.cycles} cycles after {self.args.warm_up}; the slowest process of each '
            'cycle, median (and the range).'
        )
        grown = (f'{name.replace("_", " ")} {n:g}' for name, n in self._growth().items())
        yield f'Growth: {", ".join(grown)}.'


main = RegroupBench.main
