# SPDX-License-Identifier: Apache-2.0
"""Measures how replication slows training's traffic on a shared link, with and without a rate.

    python -m tools.bench.link_share --link-gbit 2 --json link-share.json

Two pipeline stages exchange activations and gradients over gloo, and sleep in between instead of
computing; meanwhile the first stage replicates windows to a holder, one slot per iteration. All
processes run on this machine, and the link is loopback; with --link-gbit (root, iproute2) it is the
loopback of a separate network namespace, limited to that rate.

Exit status: 0 done, 2 no result.
"""

import argparse
import itertools
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.agreed import Agreed
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import window_capacity
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.slot import FORMAT_VERSION, SlotHeader, frame_bytes_bound
from moevement_ext.replicate.client import ReplicaClient
from moevement_ext.replicate.replica_server import ReplicaServer
from moevement_ext.replicate.replicator import Replicator
from tools.lab.arguments import Parser
from tools.lab.benchmark import exit_on_sigterm, run_benchmark
from tools.lab.errors import LabError
from tools.lab.figures import Spread
from tools.lab.hardware import Hardware

_SECRET = bytes(32)
_MIB = 1 << 20
_HOLDER = 1000
_WINDOW = 4
_IN_A_NETWORK = 'MOEVEMENT_LINK_SHARE'
_NETWORK = (
    'ip link set lo up && tc qdisc add dev lo root tbf rate {gbit}gbit burst 256kb latency 20ms '
    '&& exec "$@"'
)


class Bench(msgspec.Struct, frozen=True):
    """Parameters of the benchmark."""

    rounds: int = 5
    """Rounds, in each of which all kinds of replication take a turn."""
    iterations: int = 16
    """Iterations of a kind per round."""
    micro_batches: int = 8
    message_mib: int = 2
    """Size of a micro-batch's message, each way."""
    compute_s: float = 0.01
    """Time of a micro-batch."""
    ranks: int = 4
    """Ranks of the node, which replicate at the same time, each over its own connection."""
    slot_mib: int = 6
    """Slot of each rank with windows of 4; with the held rate windows have twice as many slots."""
    held_gb_per_s: float = 0.02
    """Rate of each rank."""
    link_gbit: float | None = None
    """Rate of the link; None: unlimited loopback."""


class Kind(msgspec.Struct, frozen=True):
    """Result with one kind of replication."""

    iteration_s: Spread
    ratio: float
    """Median exchange time, divided by that without replication."""
    slow_exchange_s: float
    """95th percentile of the exchange time, computing included."""
    slow_ratio: float
    """`slow_exchange_s` divided by that without replication."""
    skipped_windows: int


class LinkReport(msgspec.Struct, frozen=True):
    """Results of all kinds."""

    hardware: Hardware
    bench: Bench
    kinds: dict[str, Kind]
    """By kind: no replication, unlimited, spread over windows, and held to a rate."""


def _second_stage(bench: Bench, port: int, turns: int) -> None:
    _join(port, 1)
    message = torch.zeros(bench.message_mib * _MIB // 4)
    for _ in range(turns * bench.iterations * bench.micro_batches):
        dist.recv(message, 0)
        time.sleep(bench.compute_s)
        dist.send(message, 0)


def _hold(folder: Path, ranks: int, capacity: int, address: Connection) -> None:
    server = ReplicaServer(
        NodeStore(folder, 'bench', 'node1'), _HOLDER, dict.fromkeys(range(ranks), capacity), _SECRET
    )
    address.send(server.address)
    threading.Event().wait()


def _join(port: int, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore('127.0.0.1', port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group('gloo', store=store, rank=rank, world_size=2)


def _header(owner: int, start: int, slot: int, window: int, nbytes: int) -> SlotHeader:
    return SlotHeader(
        FORMAT_VERSION, 'run', 'layout', owner, start, window, slot, start + slot, 'p', nbytes, []
    )


class _Windows:
    """Windows of a rank on the first stage's node, and their replicator."""

    def __init__(self, folder: Path, owner: int, capacity: int, holder: tuple[str, int]) -> None:
        self._owner = owner
        self.own = OwnerWindows(NodeStore(folder, 'bench', 'node0'), owner, owner, capacity)
        self.skipped = 0
        self._iteration = self._start = 0
        self._last = threading.Event()
        self._file: WindowFile | None = None
        peers = {_HOLDER: ReplicaClient(holder, _SECRET)}
        self.replicator = Replicator(owner, peers, self._replicated, print)

    def capture(self, slot: int, window: int, nbytes: int) -> None:
        """Seal and submit the slot of one iteration."""
        if slot == 0:
            self._start = self._iteration
            self._file = self.own.begin(WindowName(self._start, 'p'))
            self.skipped += self._file is None
            self._last.clear()
        self._iteration += 1
        if self._file is None:
            return
        self._file.reserve_slot(slot, nbytes)[:] = slot
        self._file.seal_slot(_header(self._owner, self._start, slot, window, nbytes))
        if slot == window - 1:
            self.own.commit(self._file)
        self.replicator.submit(self._file, slot)

    def settle(self) -> None:
        """Wait until all captured slots are replicated."""
        if self._file is not None and not self._last.wait(120.0):
            raise LabError('windows are not replicated')

    def _replicated(self, window: WindowName) -> None:
        self.own.persisted(window)
        self.replicator.agree(Agreed(window))
        if window.start == self._start:
            self._last.set()


def _capacity(bench: Bench) -> int:
    headers = [_header(0, 10**9, slot, 2 * _WINDOW, 0) for slot in range(2 * _WINDOW)]
    slot = bench.slot_mib * _MIB
    return window_capacity((slot, frame_bytes_bound(header)) for header in headers)


def _iterate(bench: Bench) -> list[float]:
    """Run one iteration of the first stage; returns the seconds of each exchange."""
    message, seconds = torch.zeros(bench.message_mib * _MIB // 4), []
    for _ in range(bench.micro_batches):
        began = time.perf_counter()
        dist.send(message, 1)
        dist.recv(message, 1)
        seconds.append(time.perf_counter() - began)
    return seconds


@contextmanager
def _others(bench: Bench, folder: Path, port: int, turns: int) -> Iterator[tuple[str, int]]:
    """Start the other stage and the holder; yields the holder's address."""
    context = multiprocessing.get_context('spawn')
    ours, theirs = context.Pipe()
    capacity = _capacity(bench)
    processes = [
        context.Process(target=_hold, args=(folder, bench.ranks, capacity, theirs), daemon=True),
        context.Process(target=_second_stage, args=(bench, port, turns), daemon=True),
    ]
    for process in processes:
        process.start()
    try:
        if not ours.poll(120.0):
            raise LabError('the holder does not start')
        yield ours.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()


def measure(bench: Bench) -> LinkReport:
    """Run all kinds of replication in turn.

    Raises:
        LabError: windows are not replicated.
    """
    hardware = Hardware.here(gpu=False)
    seconds: dict[str, list[list[float]]] = {kind: [] for kind in ('none', 'off', 'auto', 'held')}
    skipped = dict.fromkeys(seconds, 0)
    folder = Path(tempfile.mkdtemp(prefix='link-share-', dir='/dev/shm'))
    port = _free_port()
    turns = len(seconds) * (bench.rounds + 1)
    try:
        with _others(bench, folder, port, turns) as holder:
            _join(port, 0)
            node = [_Windows(folder, rank, _capacity(bench), holder) for rank in range(bench.ranks)]
            for number in range(bench.rounds + 1):
                for kind, times in seconds.items():
                    found, missed = _turn(bench, node, kind)
                    if number:  # round 0 is the warm-up
                        times += found
                        skipped[kind] += missed
            for rank in node:
                rank.replicator.stop()
            dist.destroy_process_group()
    finally:
        shutil.rmtree(folder)
    kinds = {kind: _kind(times, seconds['none'], skipped[kind]) for kind, times in seconds.items()}
    return LinkReport(hardware, bench, kinds)


def _kind(times: list[list[float]], alone: list[list[float]], skipped: int) -> Kind:
    """Summarise the exchange times, given by iteration."""
    whole, slow = Spread.of([*map(sum, times)]), _slow(times)
    ratio = whole.median / Spread.of([*map(sum, alone)]).median
    return Kind(whole, ratio, slow, slow / _slow(alone), skipped)


def _slow(times: list[list[float]]) -> float:
    return statistics.quantiles(itertools.chain(*times), n=20)[-1]


def _turn(bench: Bench, node: list[_Windows], kind: str) -> tuple[list[list[float]], int]:
    """Exchange times of iterations after the first window; and the number of skipped windows."""
    held = kind == 'held'
    window = 2 * _WINDOW if held else _WINDOW
    nbytes = bench.slot_mib * _MIB * _WINDOW // window
    for rank in node:
        rank.replicator.limit = 1e9 * bench.held_gb_per_s if held else None
        rank.replicator.spreads = kind == 'auto'
    before, times = sum(rank.skipped for rank in node), []
    for iteration in range(bench.iterations):
        for rank in node if kind != 'none' else ():
            rank.capture(iteration % window, window, nbytes)
        times.append(_iterate(bench))
    for rank in node if kind != 'none' else ():
        rank.settle()
    return times[window:], sum(rank.skipped for rank in node) - before


def _free_port() -> int:
    store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    return int(store.port)


def print_report(report: LinkReport, console: Console) -> None:
    """Print the report for people."""
    console.print(report.hardware.line(), highlight=False, soft_wrap=True)
    table = Table()
    for column in (
        'replication',
        'iteration (s)',
        'over none',
        'slow exchange (s)',
        'over none',
        'skipped',
    ):
        table.add_column(column, justify='right' if table.columns else 'left')
    held = f'held to {report.bench.held_gb_per_s:g} GB/s'
    names = {'none': 'none', 'off': 'as fast as it goes', 'auto': 'spread', 'held': held}
    for kind, found in report.kinds.items():
        table.add_row(
            names[kind],
            found.iteration_s.text(3),
            f'{found.ratio:.2f}',
            f'{found.slow_exchange_s:.3f}',
            f'{found.slow_ratio:.2f}',
            str(found.skipped_windows),
        )
    console.print(table)


def _in_a_network_of_its_own(gbit: float, argv: Sequence[str]) -> int:
    """Run this program again in a network namespace with this rate; returns its exit status."""
    if os.geteuid() != 0 or not all(map(shutil.which, ('unshare', 'ip', 'tc'))):
        print('link_share: --link-gbit needs root and iproute2', file=sys.stderr)
        return 2
    again = [sys.executable, '-m', 'tools.bench.link_share', *argv]
    environment = {**os.environ, 'GLOO_SOCKET_IFNAME': 'lo', _IN_A_NETWORK: '1'}
    script = _NETWORK.format(gbit=f'{gbit:g}')
    command = ['unshare', '--net', 'sh', '-c', script, 'sh', *again]
    return subprocess.call(command, env=environment)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the flags; exits with a message if they are wrong."""
    parser = Parser(prog='python -m tools.bench.link_share', description=__doc__)
    default = Bench()
    parser.add_argument('--rounds', type=int, default=default.rounds, help='(default: 5)')
    parser.add_argument(
        '--iterations', type=int, default=default.iterations, help='16, 24, ... (default: 16)'
    )
    parser.add_argument(
        '--held', type=float, default=default.held_gb_per_s, metavar='GB_PER_S',
        help='the number (default: 0.02)',
    )  # fmt: skip
    parser.add_argument('--link-gbit', type=float, help='(default: no limit)')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write the report here')
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f'--rounds {args.rounds}: must be at least 1')
    if args.iterations < 4 * _WINDOW or args.iterations % (2 * _WINDOW):
        parser.error(f'--iterations {args.iterations}: must be 16, 24, ...')
    if not args.held >= 0.02:
        parser.error(f'--held {args.held:g}: must be at least 0.02')
    if args.link_gbit is not None and not args.link_gbit > 0:
        parser.error(f'--link-gbit {args.link_gbit:g}: must be above 0')
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    given = sys.argv[1:] if argv is None else argv
    args = parse_arguments(given)
    if args.link_gbit is not None and _IN_A_NETWORK not in os.environ:
        return _in_a_network_of_its_own(args.link_gbit, given)
    bench = Bench(
        rounds=args.rounds,
        iterations=args.iterations,
        held_gb_per_s=args.held,
        link_gbit=args.link_gbit,
    )
    return run_benchmark(
        'link_share',
        lambda console: measure(bench),
        print_report,
        args.json,
        passed=lambda report: True,
    )


if __name__ == '__main__':
    exit_on_sigterm()
    sys.exit(main())
