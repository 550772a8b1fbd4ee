# SPDX-License-Identifier: Apache-2.0
"""Measures how fast process groups unblock and reconnect, and which resources they leak.

    moevement bench regroup --json regroup.json

Each cycle: all groups are used, every rank but one waits in an all-reduce, all ranks unblock, and
all groups are renewed in place. Resources are counted after a warm-up and at the end.

Exit status: 0 done, 1 a counted resource (all but memory) grew, 2 a process failed.
"""

import argparse
import multiprocessing
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed import PrefixStore, Store, TCPStore

from moevement_ext.regroup.interruptible_store import InterruptibleStore
from moevement_ext.regroup.process_groups import ProcessGroups

from ..lab.arguments import Parser, at_least
from ..lab.benchmark import exit_on_sigterm, run_benchmark
from ..lab.errors import LabError
from ..lab.figures import Spread
from ..lab.hardware import Hardware
from ..lab.tables import say, table
from .frame import Report, Way, print_ways

WAYS = ('unblock', 'renew')
_COUNTED = ('file_descriptors', 'threads', 'shm_files', 'store_keys')
_TIMEOUT = timedelta(seconds=60)
_SHM = '/dev/shm/'
_MIB = 1 << 20


class RankReport(msgspec.Struct, frozen=True):
    """Results of one process."""

    groups: int
    unblock_s: list[float]
    renew_s: list[float]
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

    def __init__(self, args: argparse.Namespace, rank: int, port: int, barrier: Any) -> None:
        torch.set_num_threads(1)
        self._args = args
        self._rank = rank
        self._together = barrier
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
        unblock, renew = map(list, zip(*times, strict=True))
        growth = {name: after[name] - value for name, value in before.items()}
        return RankReport(len(self._groups), unblock, renew, growth)

    def _cycle(self, cycle: int) -> tuple[float, float]:
        """Run one cycle; returns the seconds to leave the all-reduce, and to connect all groups."""
        tensor = torch.ones(1)
        for group in self._groups:
            dist.all_reduce(tensor, group=group)
        pending = dist.all_reduce(tensor, async_op=True) if self._rank else None
        self._together.wait(_TIMEOUT.total_seconds())
        start = time.monotonic()
        self._process_groups.unblock()
        if pending is not None:
            _expect_error(pending)
        unblocked = time.monotonic()
        self._together.wait(_TIMEOUT.total_seconds())
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
        self._together.wait(_TIMEOUT.total_seconds())
        taken = {
            'file_descriptors': process.num_fds(),
            'threads': process.num_threads(),
            'memory_mib': process.memory_info().rss / _MIB,
            'shm_files': sum(map.path.startswith(_SHM) for map in process.memory_maps()),
            'store_keys': self._store.num_keys(),
        }
        self._together.wait(_TIMEOUT.total_seconds())
        return taken


def _expect_error(work: dist.Work) -> None:
    try:
        work.wait()
    except RuntimeError:
        return
    raise RuntimeError('an all-reduce that one rank never entered has returned')


def _serve(args: argparse.Namespace, rank: int, port: int, barrier: Any, pipe: Connection) -> None:
    try:
        pipe.send(_Rank(args, rank, port, barrier).run())
    except Exception:
        barrier.abort()
        pipe.send(traceback.format_exc())


def measure(args: argparse.Namespace, console: Console) -> Report:
    hardware = Hardware.here(gpu=False)
    ranks = run_ranks(args)
    growth = {name: max(rank.growth[name] for rank in ranks) for name in ranks[0].growth}
    settings = {
        'processes': args.processes,
        'groups_per_process': ranks[0].groups,
        'cycles': args.cycles,
        'warm_up': args.warm_up,
        'growth': growth,
    }
    grown = [name for name in _COUNTED if growth[name] > 0]
    ways = {name: _slowest([getattr(rank, f'{name}_s') for rank in ranks], name) for name in WAYS}
    return Report(hardware, settings, ways, grown, msgspec.to_builtins(ranks))


def _slowest(times: Sequence[Sequence[float]], title: str) -> Way:
    """Over the cycles; of each cycle the slowest process."""
    return Way(title, {'seconds': Spread.of([max(cycle) for cycle in zip(*times, strict=True)])})


def run_ranks(args: argparse.Namespace) -> list[RankReport]:
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['torch.distributed'])
    barrier = context.Barrier(args.processes)
    pipes = []
    for rank in range(args.processes):
        ours, theirs = context.Pipe()
        arguments = (args, rank, store.port, barrier, theirs)
        context.Process(target=_serve, args=arguments, daemon=True).start()
        theirs.close()
        pipes.append(ours)
    return [_received(rank, pipe) for rank, pipe in enumerate(pipes)]


def _received(rank: int, pipe: Connection) -> RankReport:
    try:
        answer = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise LabError(f'rank {rank} died') from None
    if not isinstance(answer, RankReport):
        raise LabError(f'rank {rank}: {answer}')
    return answer


def print_report(report: Report, console: Console) -> None:
    settings = report.settings
    say(console, report.hardware.line())
    say(
        console,
        f'{settings["processes"]} processes with {settings["groups_per_process"]} groups each, '
        f'{settings["cycles"]} cycles after {settings["warm_up"]}; the slowest process of each '
        'cycle, median (and the range).',
    )
    print_ways(report.ways.values(), {'seconds': ('seconds', 4)}, console)
    growth = settings['growth'].items()
    rows = ((name.replace('_', ' '), f'{value:g}') for name, value in growth)
    console.print(table(('', '>growth'), rows))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog='moevement bench regroup', description=__doc__)
    parser.add_argument('--processes', type=int, default=4, help='even (default: 4)')
    parser.add_argument('--cycles', type=at_least(1), default=1000, help='(default: 1000)')
    parser.add_argument(
        '--warm-up', type=at_least(1), default=50, help='cycles before (default: 50)'
    )
    parser.add_argument('--json', type=Path, metavar='FILE', help='write the report here')
    args = parser.parse_args(argv)
    if args.processes < 2 or args.processes % 2:
        parser.error(f'--processes {args.processes}: must be even and at least 2')
    return args


def main(argv: Sequence[str] | None = None) -> int:
    exit_on_sigterm()
    return run_benchmark('bench_regroup', parse_arguments(argv), measure, print_report)


if __name__ == '__main__':
    sys.exit(main())
