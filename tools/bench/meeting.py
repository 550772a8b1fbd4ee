# SPDX-License-Identifier: Apache-2.0
"""Measures what it takes thousands of ranks to meet after a failure, up to the verdict of each.

    python -m tools.bench.meeting --ranks 1024 4096 16384 --json meeting.json

Rendezvous, protocol, reports, store and branches are real, and in processes of their own; ranks are
threads of a few. Leaders of nodes are left out, as if none had anything to combine: each rank asks
a branch, so that branches are busier here than in a job. All processes share the cores of this
machine, on which the seconds until all have met say little. So each is asked what it computes, and
one rank what it does alone; that is what remains where each has a core.

Exit status: 0 done, 2 a process failed.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore

from moevement_ext.membership import brought
from moevement_ext.membership.node_copy import NodeCopy
from moevement_ext.membership.rendezvous import Meeting, Rendezvous, announce_failure
from moevement_ext.membership.report import decode_all, encode
from moevement_ext.recover.verdict import Localized, decide_recovery
from moevement_ext.store.branches import Branches, needed
from moevement_ext.store.server import allow_many_connections
from tools.bench.control_plane_members import RANKS_PER_NODE, Layout, newcomer
from tools.lab.arguments import Parser
from tools.lab.benchmark import exit_on_sigterm, run_benchmark
from tools.lab.cpu_clock import exact_cpu_seconds
from tools.lab.errors import LabError
from tools.lab.hardware import Hardware

_HERE = '127.0.0.1'
_TIMEOUT = timedelta(minutes=20)
_COMMITTED = 41
_LAST_ITERATION = 1_000_000
_STACK_BYTES = 1 << 18
_LESS_THAN_WHO_SERVES = 19
_LOOK_FOR_THE_LOCK_S = 1.0
"""Else thousands of threads that wait for the interpreter do little but look for it."""


class Bench(msgspec.Struct, frozen=True):
    """What is to be run, for each number of ranks."""

    ranks: list[int]
    processes: int
    failures: int
    branches: bool
    """A job of so many nodes has them; else each rank asks the store itself."""


class Size(msgspec.Struct, frozen=True):
    """Figures of one number of ranks; of several failures the median. Seconds."""

    ranks: int
    branches: int
    store_s: float
    """That the store computes until all have met."""
    branch_s: float
    """That the busiest branch computes until then."""
    pack_s: float
    """That the rank that comes last computes, for all: it packs what they have brought."""
    read_s: float
    """That each rank computes: it unpacks that, and comes to a verdict."""
    at_least_s: float
    """Until the verdict of the last, where each process has a core, if store and branches compute
    at the same time all the while."""
    at_most_s: float
    """The same if they never do: the sum."""
    met_here_s: float
    """Until all had met, on the cores of this machine."""
    afterwards_store_s: float
    """That the store computes besides, until all have passed the two barriers of a recovery."""
    packed_kib: float
    """What each node reads, in KiB."""


class MeetingReport(msgspec.Struct, frozen=True):
    """Everything that was found."""

    hardware: Hardware
    bench: Bench
    ranks_per_node: int
    sizes: list[Size]


class _Ranks:
    """Some ranks of a job, each a thread with a connection of its own.

    Args:
        ports: where the ranks of a node ask, by node.
        world_size: number of all ranks.
        ranks: these: all of some nodes.
    """

    def __init__(self, ports: Sequence[int], world_size: int, ranks: Sequence[int]) -> None:
        self._ports = ports
        self._layout = Layout(world_size)
        self._all: dict[int, Rendezvous] = {}
        self._meetings: dict[int, Meeting] = {}
        self._nodes = {rank // RANKS_PER_NODE: _ReadOnce() for rank in ranks}
        self._ranks = ranks
        self._threads = ThreadPoolExecutor(len(ranks))

    def connect(self) -> None:
        """One after the other: here, many at once would be given up as lost."""
        for rank in self._ranks:
            self._connect(rank)

    def begin(self) -> None:
        """All meet for the first time."""
        self._each(self._come)

    def meet(self, victim: int) -> None:
        """All meet after a failure; one of them is new."""

        def meet(rank: int) -> None:
            if rank == victim:
                self._connect(rank)
                self._come(rank)
            else:
                report = encode(self._layout.report(rank, 0, _COMMITTED))
                after = self._meetings[rank].epoch
                self._meetings[rank] = self._all[rank].meet(lambda: report, _TIMEOUT, after)

        self._each(meet)

    def pass_barriers(self) -> None:
        """Those of a recovery."""

        def barriers(rank: int) -> None:
            for name in ('ready', 'replayed'):
                self._all[rank].barrier(self._meetings[rank], name, _TIMEOUT)

        self._each(barriers)

    def forget(self) -> None:
        """Return when the keys of former epochs are deleted, as they are beside training."""
        for thread in threading.enumerate():
            if thread.name == 'sparse-ckpt-forget':
                thread.join()

    def _connect(self, rank: int) -> None:
        port = self._ports[rank // RANKS_PER_NODE]
        store = TCPStore(_HERE, port, is_master=False, timeout=_TIMEOUT)
        node = self._nodes[rank // RANKS_PER_NODE]
        self._all[rank] = Rendezvous(store, rank, self._layout.world_size, node)

    def _come(self, rank: int) -> None:
        self._all[rank].predecessor_took_part()
        self._meetings[rank] = self._all[rank].meet(lambda: encode(newcomer(rank)), _TIMEOUT)

    def _each(self, what: Callable[[int], None]) -> None:
        for done in [self._threads.submit(what, rank) for rank in self._ranks]:
            done.result()


def _run_ranks(
    ports: Sequence[int], world_size: int, numbers: Sequence[int], pipe: Connection
) -> None:
    """A process of ranks: does what it is told, and answers."""
    threading.stack_size(_STACK_BYTES)
    try:
        allow_many_connections()
        os.nice(_LESS_THAN_WHO_SERVES)
        sys.setswitchinterval(_LOOK_FOR_THE_LOCK_S)
        _unpack_once()
        ranks = _Ranks(ports, world_size, numbers)
        while order := pipe.recv():
            name, *arguments = order
            pipe.send(getattr(ranks, name)(*arguments))
    except (Exception, KeyboardInterrupt):
        pipe.send(traceback.format_exc())


class _ReadOnce(NodeCopy):
    """What the ranks of a node read, one of them does, as in a job; without the file in between."""

    def __init__(self) -> None:
        self._reading = threading.Lock()
        self._known: dict[bytes, bytes] = {}

    def read(self, digest: bytes, from_store: Callable[[], bytes]) -> bytes:
        """The content of that digest."""
        with self._reading:
            if digest not in self._known:
                self._known = {digest: from_store()}
            return self._known[digest]


def _unpack_once() -> None:
    """The ranks of this process share what each would unpack for itself: that is measured apart."""
    unpack, unpacking = brought.unpacked_together, threading.Lock()
    known: dict[bytes, list[bytes]] = {}

    def shared(whole: bytes) -> list[bytes]:
        with unpacking:
            if whole not in known:
                known.clear()
                known[whole] = unpack(whole)
            return known[whole]

    brought.unpacked_together = shared


def _serve(pipe: Connection) -> None:
    """The process of the store."""
    allow_many_connections()
    store = TCPStore(_HERE, 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


class _Job:
    """The processes of one number of ranks, until closed."""

    def __init__(self, bench: Bench, world_size: int) -> None:
        context = multiprocessing.get_context('forkserver')
        self._world_size = world_size
        self._server_pipe, theirs = context.Pipe()
        server = context.Process(target=_serve, args=(theirs,), daemon=True)
        server.start()
        assert server.pid is not None
        self._server = server.pid
        port = self._server_pipe.recv()
        nodes = -(-world_size // RANKS_PER_NODE)
        self.branches = Branches(_HERE, port, needed(nodes) if bench.branches else 0, _HERE)
        ports = self.branches.ports or [port]
        self._store = TCPStore(_HERE, port, is_master=False)
        self._pipes: list[Connection] = []
        for first in range(bench.processes):
            ours, theirs = context.Pipe()
            numbers = [
                rank
                for rank in range(world_size)
                if rank // RANKS_PER_NODE % bench.processes == first
            ]
            of_nodes = [ports[node % len(ports)] for node in range(nodes)]
            arguments = (of_nodes, world_size, numbers, theirs)
            context.Process(target=_run_ranks, args=arguments, daemon=True).start()
            self._pipes.append(ours)

    def all(self, *order: Any) -> None:
        """Have all ranks do something; returns when all have."""
        for pipe in self._pipes:
            pipe.send(order)
        for pipe in self._pipes:
            try:
                failed = pipe.recv()
            except (EOFError, ConnectionResetError):
                failed = 'a process died'
            if failed is not None:
                raise LabError(failed)

    def lose(self, rank: int) -> None:
        """Say as a launcher that a rank is dead."""
        announce_failure(self._store, rank, f'worker of rank {rank} died')

    def cpu_s(self) -> list[float]:
        """Seconds that the store, and then each branch, have computed since their start."""
        return [exact_cpu_seconds(pid) for pid in (self._server, *self.branches.pids)]

    def close(self) -> None:
        """End all processes."""
        for pipe in (*self._pipes, self._server_pipe):
            pipe.send(None)
        self.branches.close()


def measure(bench: Bench, world_size: int) -> Size:
    """One job, from its start to its end.

    Raises:
        LabError: a process failed; its traceback.
    """
    victim = world_size - 1
    found = []
    with closing(_Job(bench, world_size)) as job:
        job.all('connect')
        job.all('begin')
        for _ in range(bench.failures):
            before, began = job.cpu_s(), time.monotonic()
            job.lose(victim)
            job.all('meet', victim)
            met, met_s = job.cpu_s(), time.monotonic() - began
            job.all('pass_barriers')
            found.append((_spent(before, met), _spent(met, job.cpu_s()), met_s))
            job.all('forget')
        of_branches = len(job.branches.ports)
    store_s = statistics.median(met[0] for met, _, _ in found)
    branch_s = statistics.median(max(met[1:], default=0.0) for met, _, _ in found)
    pack_s, read_s, nbytes = _of_one_rank(world_size)
    return Size(
        ranks=world_size,
        branches=of_branches,
        store_s=store_s,
        branch_s=branch_s,
        pack_s=pack_s,
        read_s=read_s,
        at_least_s=max(store_s, branch_s) + pack_s + read_s,
        at_most_s=store_s + branch_s + pack_s + read_s,
        met_here_s=statistics.median(met_s for _, _, met_s in found),
        afterwards_store_s=statistics.median(later[0] for _, later, _ in found),
        packed_kib=nbytes / 1024,
    )


def _spent(before: Sequence[float], after: Sequence[float]) -> list[float]:
    return [late - early for early, late in zip(before, after, strict=True)]


def _of_one_rank(world_size: int) -> tuple[float, float, int]:
    """Seconds that one computes to pack what all bring, and each to a verdict; bytes in between."""
    layout = Layout(world_size)
    reports = [layout.report(rank, 0, _COMMITTED) for rank in range(world_size - 1)]
    items = [encode(report) for report in [*reports, newcomer(world_size - 1)]]
    left = [brought.packed(item) for item in items]
    began = time.thread_time()
    whole = brought.packed_together([brought.unpacked(item) for item in left])
    packed = time.thread_time()
    verdict = decide_recovery(
        decode_all(brought.unpacked_together(whole)), layout.stage_of, (), _LAST_ITERATION
    )
    read = time.thread_time()
    if not isinstance(verdict, Localized):
        raise LabError(f'{verdict}')
    return packed - began, read - packed, len(whole)


def run(bench: Bench, console: Console) -> MeetingReport:
    """All numbers of ranks, one after the other."""
    sizes = []
    for world_size in bench.ranks:
        sizes.append(measure(bench, world_size))
        console.print(f'{world_size} ranks: done', highlight=False)
    return MeetingReport(Hardware.here(gpu=False), bench, RANKS_PER_NODE, sizes)


def print_report(report: MeetingReport, console: Console) -> None:
    """For people."""
    console.print(report.hardware.line(), highlight=False, soft_wrap=True)
    table = Table()
    table.add_column('ranks')
    for size in report.sizes:
        table.add_column(f'{size.ranks}', justify='right')
    for field in Size.__struct_fields__[1:]:
        cells = [f'{getattr(size, field):.3g}' for size in report.sizes]
        table.add_row(field.replace('_', ' '), *cells)
    console.print(table)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked; exits with a message if they are wrong."""
    parser = Parser(
        prog='python -m tools.bench.meeting',
        description=__doc__,
    )
    sizes = [1024, 4096, 16384]
    listed = ' '.join(map(str, sizes))
    parser.add_argument('--ranks', type=int, nargs='+', default=sizes, help=f'(default: {listed})')
    parser.add_argument('--processes', type=int, default=4, help='of all ranks (default: 4)')
    parser.add_argument('--failures', type=int, default=3, help='of each job (default: 3)')
    parser.add_argument(
        '--without-branches',
        dest='branches',
        action='store_false',
        help='each rank asks the store itself',
    )
    parser.add_argument('--json', type=Path, metavar='FILE', help='write everything here')
    args = parser.parse_args(argv)
    if min(args.ranks) < 3 * RANKS_PER_NODE or sorted(set(args.ranks)) != args.ranks:
        parser.error(f'--ranks: must ascend, and be at least {3 * RANKS_PER_NODE}, three nodes')
    if not (0 < args.processes <= min(args.ranks) // RANKS_PER_NODE and args.failures > 0):
        parser.error('--processes, --failures: must be above 0, and no more processes than nodes')
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    bench = Bench(args.ranks, args.processes, args.failures, args.branches)
    return run_benchmark(
        'bench_meeting',
        lambda console: run(bench, console),
        print_report,
        args.json,
        passed=lambda report: True,
    )


if __name__ == '__main__':
    exit_on_sigterm()
    sys.exit(main())
