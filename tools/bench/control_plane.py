# SPDX-License-Identifier: Apache-2.0
"""Measures what the ranks of a job ask of the launcher's store, at rest and after a failure.

    python -m tools.bench.control_plane --ranks 64 256 1024 --json control-plane.json

Members, leaders of nodes, store and protocol are real, training is not (`control_plane_members`).
The store has a process of its own, the busiest of a job, and so has each leader; ranks are threads
of a few others. What is counted arrives at the store. They meet, iterate for
a while, and lose a rank, which is replaced at once, some times over. At larger numbers figures are
extrapolated by a power of the number of ranks that is fitted to those measured. A window has four
iterations. The seconds that all ranks take share the cores of this machine here; those that the
store computes do not.

Exit status: 0 done, 2 a process failed.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore

from moevement_ext.membership.rendezvous import announce_failure, break_epoch, present_epoch
from tools.bench.control_plane_leaders import Leaders
from tools.bench.control_plane_members import (
    HANG_TIMEOUT_S,
    RANKS_PER_NODE,
    Ranks,
    Traffic,
    packed_bytes,
)
from tools.lab.arguments import Parser
from tools.lab.benchmark import exit_on_sigterm, run_benchmark
from tools.lab.cpu_clock import exact_cpu_seconds
from tools.lab.errors import LabError
from tools.lab.figures import Spread
from tools.lab.hardware import Hardware
from tools.lab.job import memory_directory

_EXTRAPOLATED = (4_096, 16_384)
_FITTED = (
    'requests_at_rest',
    'store_cpu_at_rest',
    'requests',
    'verdict_s',
    'store_cpu_s',
)
_MIB = 1 << 20


class Bench(msgspec.Struct, frozen=True):
    """What is to be run, for each number of ranks."""

    ranks: list[int]
    processes: int
    failures: int
    rest_s: float
    iteration_s: float
    leaders: bool
    """The ranks of a node ask together."""
    branches: int = 0
    """Beside the store, through which the leaders of nodes ask together."""


class Size(msgspec.Struct, frozen=True):
    """Figures of one number of ranks; of several failures the median."""

    ranks: int
    start_s: float
    """Until all had met for the first time."""
    start_requests: float
    start_mib: float
    requests_at_rest: float
    """Each second, of all ranks."""
    requests_at_rest_per_rank: float
    store_cpu_at_rest: float
    """Seconds that the store computes in a second."""
    requests: float
    """For a failure, until all go on."""
    mib: float
    verdict_s: float
    """From the launcher's word to the verdict of the last rank."""
    verdict_range_s: Spread
    go_on_s: float
    """From there to the end of the recovery's two barriers."""
    store_cpu_s: float
    """That the store computes for a failure."""
    largest_value_bytes: int
    keys: int
    """In the store, at the end."""


class Fit(msgspec.Struct, frozen=True):
    """A figure grows as the number of ranks to the power of `exponent`."""

    exponent: float
    extrapolated: dict[str, float]
    """By number of ranks."""


class ControlPlaneReport(msgspec.Struct, frozen=True):
    """Everything that was found."""

    hardware: Hardware
    bench: Bench
    ranks_per_node: int
    hang_timeout_s: float
    sizes: list[Size]
    fits: dict[str, Fit]
    """By figure; empty for a single number of ranks."""
    reports_mib: dict[str, float]
    """By number of ranks: what of a failure are reports that nodes read, one of each; computed."""


def _serve(pipe: Connection) -> None:
    """The process of the store: as that of the launcher, but that it does nothing else."""
    store = TCPStore('localhost', 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def _run_ranks(
    ports: Sequence[int],
    memory: Path,
    world_size: int,
    numbers: Sequence[int],
    pipe: Connection,
) -> None:
    """A process of ranks: does what it is told, and answers."""
    try:
        ranks = Ranks(ports, memory, world_size, numbers)
        while True:
            order, *arguments = pipe.recv()
            if order == 'end':
                ranks.end()
                pipe.send(None)
                pipe.recv()
                ranks.join()
                pipe.send(None)
                return
            if order == 'traffic':
                pipe.send(ranks.tally.read())
            else:
                pipe.send(getattr(ranks, order)(*arguments))
    except (Exception, KeyboardInterrupt):
        pipe.send(traceback.format_exc())


class _Job:
    """The processes of one number of ranks."""

    def __init__(self, bench: Bench, world_size: int, memory: Path) -> None:
        context = multiprocessing.get_context('forkserver')
        context.set_forkserver_preload(['tools.bench.control_plane_members'])
        self._pipes: list[Connection] = []
        ours, theirs = context.Pipe()
        server = context.Process(target=_serve, args=(theirs,), daemon=True)
        server.start()
        port = _received(ours)
        assert server.pid is not None
        self._server, self._server_pipe = server.pid, ours
        self.store = TCPStore('localhost', port, is_master=False)
        self._world_size = world_size
        nodes = -(-world_size // RANKS_PER_NODE)
        self._leaders = Leaders(port, nodes, bench.branches) if bench.leaders else None
        ports = self._leaders.ports if self._leaders else [port] * nodes
        for first in range(bench.processes):
            ours, theirs = context.Pipe()
            numbers = range(first, world_size, bench.processes)
            arguments = (ports, memory, world_size, numbers, theirs)
            context.Process(target=_run_ranks, args=arguments, daemon=True).start()
            self._pipes.append(ours)

    def all(self, *order: Any) -> list[Any]:
        """Have all processes do something; their answers."""
        for pipe in self._pipes:
            pipe.send(order)
        return [_received(pipe) for pipe in self._pipes]

    def traffic(self) -> Traffic:
        """What the store was asked, by leaders or ranks, since the start."""
        if self._leaders is not None:
            return self._leaders.traffic()
        return sum(self.all('traffic'), Traffic())

    def store_cpu_s(self) -> float:
        """Seconds that the store has computed since its start."""
        return exact_cpu_seconds(self._server)

    def fail(self) -> tuple[float, float]:
        """Lose the last rank; seconds until all have a verdict, and from there until all go on."""
        victim = self._world_size - 1
        began = time.monotonic()
        announce_failure(self.store, victim, f'worker of rank {victim} died')
        verdicts, went_on = zip(*self.all('fail', victim), strict=True)
        return max(verdicts) - began, max(went_on) - max(verdicts)

    def end(self) -> None:
        """End all processes."""
        self.all('end')
        break_epoch(self.store, present_epoch(self.store), 'the benchmark is over')
        self.all(None)
        if self._leaders is not None:
            self._leaders.close()
        self._server_pipe.send(None)


def _received(pipe: Connection) -> Any:
    try:
        answer = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise LabError('a process died') from None
    if isinstance(answer, str):
        raise LabError(answer)
    return answer


def measure(bench: Bench, world_size: int, memory: Path) -> Size:
    """One job, from its start to its end.

    Args:
        bench: what is to be run.
        world_size: number of ranks.
        memory: directory for the memory of all nodes.

    Raises:
        LabError: a process failed; its traceback.
    """
    job = _Job(bench, world_size, memory)
    job.all('traffic')  # the processes are there
    began = time.monotonic()
    start_s = max(job.all('start')) - began
    started = job.traffic()
    at_rest, cpu_at_rest = _rest(job, bench)
    verdicts, others, traffics, cpu = [], [], [], []
    for _ in range(bench.failures):
        before, cpu_before = job.traffic(), job.store_cpu_s()
        verdict_s, go_on_s = job.fail()
        verdicts.append(verdict_s)
        others.append(go_on_s)
        cpu.append(job.store_cpu_s() - cpu_before)
        traffics.append(job.traffic().since(before))
        job.all('iterate')
    size = Size(
        ranks=world_size,
        start_s=start_s,
        start_requests=started.requests,
        start_mib=started.nbytes / _MIB,
        requests_at_rest=at_rest,
        requests_at_rest_per_rank=at_rest / world_size,
        store_cpu_at_rest=cpu_at_rest,
        requests=statistics.median(one.requests for one in traffics),
        mib=statistics.median(one.nbytes for one in traffics) / _MIB,
        verdict_s=statistics.median(verdicts),
        verdict_range_s=Spread.of(verdicts),
        go_on_s=statistics.median(others),
        store_cpu_s=statistics.median(cpu),
        largest_value_bytes=job.traffic().largest,
        keys=job.store.num_keys(),
    )
    job.end()
    return size


def _rest(job: _Job, bench: Bench) -> tuple[float, float]:
    """Requests, and seconds that the store computes, in a second without a failure."""
    job.all('iterate')
    before, cpu_before, began = job.traffic(), job.store_cpu_s(), time.monotonic()
    while time.monotonic() - began < bench.rest_s:
        time.sleep(bench.iteration_s)
        job.all('iterate')
    seconds = time.monotonic() - began
    requests = job.traffic().since(before).requests
    return requests / seconds, (job.store_cpu_s() - cpu_before) / seconds


def fit(sizes: Sequence[Size], figure: str) -> Fit:
    """The power law through what was measured; extrapolated from the largest."""
    ranks = np.log([size.ranks for size in sizes])
    values = np.log([max(getattr(size, figure), 1e-6) for size in sizes])
    exponent = float(np.polyfit(ranks, values, 1)[0])
    largest = sizes[-1]
    extrapolated = {
        str(number): getattr(largest, figure) * (number / largest.ranks) ** exponent
        for number in _EXTRAPOLATED
    }
    return Fit(exponent, extrapolated)


def run(bench: Bench, console: Console) -> ControlPlaneReport:
    """All numbers of ranks, one after the other."""
    sizes = []
    for world_size in bench.ranks:
        with memory_directory() as memory:
            sizes.append(measure(bench, world_size, memory))
        console.print(f'{world_size} ranks: done', highlight=False)
    fits = {figure: fit(sizes, figure) for figure in _FITTED} if len(sizes) > 1 else {}
    hardware = Hardware.here(gpu=False)
    return ControlPlaneReport(
        hardware, bench, RANKS_PER_NODE, HANG_TIMEOUT_S, sizes, fits, reports_mib()
    )


def reports_mib() -> dict[str, float]:
    """What grows with the square of the number of ranks, and no power law shows at first."""
    return {
        str(number): number // RANKS_PER_NODE * packed_bytes(number) / _MIB
        for number in _EXTRAPOLATED
    }


def print_report(report: ControlPlaneReport, console: Console) -> None:
    """For people."""
    console.print(report.hardware.line(), highlight=False, soft_wrap=True)
    table = Table()
    numbers = [f'{size.ranks}' for size in report.sizes]
    table.add_column('ranks')
    for column in [*numbers, 'grows as', *(f'{n} (fit)' for n in _EXTRAPOLATED)]:
        table.add_column(column, justify='right')
    for field in Size.__struct_fields__:
        if field in ('ranks', 'verdict_range_s'):
            continue
        cells = [f'{getattr(size, field):.3g}' for size in report.sizes]
        found = report.fits.get(field)
        if found is not None:
            cells.append(f'N^{found.exponent:.2f}')
            cells += [f'{value:.3g}' for value in found.extrapolated.values()]
        table.add_row(field.replace('_', ' '), *cells)
    console.print(table)
    reports = ', '.join(f'{mib:.0f} MiB at {n} ranks' for n, mib in report.reports_mib.items())
    console.print(f'Reports that nodes read in a failure: {reports}.', highlight=False)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked; exits with a message if they are wrong."""
    parser = Parser(
        prog='python -m tools.bench.control_plane',
        description=__doc__,
    )
    sizes = [64, 256, 1024]
    parser.add_argument(
        '--ranks', type=int, nargs='+', default=sizes, help='(default: 64 256 1024)'
    )
    parser.add_argument('--processes', type=int, default=4, help='of all ranks (default: 4)')
    parser.add_argument('--failures', type=int, default=3, help='of each job (default: 3)')
    parser.add_argument('--rest', type=float, default=60.0, help='seconds at rest (default: 60)')
    parser.add_argument('--iteration', type=float, default=5.0, help='seconds of one (default: 5)')
    parser.add_argument(
        '--without-leaders',
        dest='leaders',
        action='store_false',
        help='each rank asks the store itself, as under torchrun',
    )
    parser.add_argument(
        '--branches', type=int, default=0, help='through which leaders ask the store (default: 0)'
    )
    parser.add_argument('--json', type=Path, metavar='FILE', help='write everything here')
    args = parser.parse_args(argv)
    if min(args.ranks) < 3 * RANKS_PER_NODE or sorted(set(args.ranks)) != args.ranks:
        parser.error(f'--ranks: must ascend, and be at least {3 * RANKS_PER_NODE}, three nodes')
    if min(args.processes, args.failures) < 1 or min(args.rest, args.iteration) <= 0:
        parser.error('--processes, --failures, --rest, --iteration: must be above 0')
    if args.branches < 0 or (args.branches and not args.leaders):
        parser.error('--branches: must be 0 or more, and needs leaders')
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    bench = Bench(
        args.ranks,
        args.processes,
        args.failures,
        args.rest,
        args.iteration,
        args.leaders,
        args.branches,
    )
    return run_benchmark(
        'bench_control_plane',
        lambda console: run(bench, console),
        print_report,
        args.json,
        passed=lambda report: True,
    )


if __name__ == '__main__':
    exit_on_sigterm()
    sys.exit(main())
