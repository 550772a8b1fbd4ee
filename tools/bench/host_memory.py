# SPDX-License-Identifier: Apache-2.0
"""Measures the host memory that protection uses: files by kind, and memory of the processes.

    python -m tools.bench.host_memory --json host-memory.json
    python -m tools.bench.host_memory --reserve /dev/shm

A small model trains on two emulated nodes, without protection as the reference, and with windows of
each given length. Every quarter of a second the tool reads the sizes of the files in the tmpfs and
the private memory of the workers; it reports the largest and the last value during training. Bytes
do not depend on the load of the machine.

With `--reserve` no job runs: the tool reserves 1 GB in the directory several times, as for a window
file, and prints the CPU seconds of each reservation. They depend on the huge pages of the mount.

Exit status: 0 done, 2 a run failed.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.mapped import map_new
from tools.bench import model
from tools.lab.arguments import Parser
from tools.lab.benchmark import add_output_flags, exit_on_sigterm, prepare, run_benchmark
from tools.lab.job import Job, memory_directory
from tools.lab.launch import Launch, Launcher
from tools.lab.models import sparse_flags
from tools.lab.tables import table
from tools.lab.trained import train

_POLL_S = 0.25
_PLAIN = 'none'
_TRIES = 5
_ALONE = '--pipeline-model-parallel-size 1 --expert-model-parallel-size 1'.split()
MIB = 2**20
LOG = 'log'
"""Kind of the files that log the sends of stages."""


class Account(msgspec.Struct, frozen=True):
    """Bytes of all ranks of one job."""

    windows: str
    """`--sparse-ckpt-window`, or `none`."""
    most: dict[str, int]
    """Largest value by kind."""
    last: dict[str, int]
    """Value at the end of training by kind."""
    captured: int
    """Bytes of the newest window's slots, over all ranks, from the log of the last rank."""


class MemoryReport(msgspec.Struct, frozen=True):
    """Accounts of all jobs."""

    ranks: int
    iterations: int
    accounts: list[Account]


def files_by_kind(root: Path) -> Counter[str]:
    """Return bytes of the files of a run: windows by holder and state, and others.

    Files that are renamed during the scan are left out.
    """
    found: Counter[str] = Counter()
    for path in root.rglob('*'):
        try:
            nbytes = 512 * path.stat().st_blocks if path.is_file() else 0
        except OSError:
            continue
        found[_kind(path)] += nbytes
    return found


def _kind(path: Path) -> str:
    if path.suffix == '.window':
        owner, holder = path.parent.name, path.parent.parent.name
        whose = 'own' if owner == holder else 'replica'
        return f'{whose} {"whole" if path.name.startswith("window-") else "next"}'
    return {'upstream-log': LOG, 'ledger': 'ledger'}.get(path.name, 'beside')


def private_bytes(pid: int) -> Counter[str]:
    """Private memory of a process by place: heap, other anonymous mappings."""
    found: Counter[str] = Counter()
    place = ''
    try:
        lines = Path(f'/proc/{pid}/smaps').read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        name, _, rest = line.partition(' ')
        if not name.endswith(':'):
            place = 'heap' if line.endswith('[heap]') else 'anonymous'
        elif name == 'Anonymous:':
            found[f'process, {place}'] += 1024 * int(rest.split()[0])
    return found


def account(windows: str, data: Path, output: Path, args: argparse.Namespace) -> Account:
    most, last = Counter[str](), Counter[str]()
    with memory_directory() as memory:

        def sample(job: Job) -> None:
            nonlocal most, last
            for log in job.follow('the end', _POLL_S):
                private = map(private_bytes, job.pids() if log.iterations else [])
                if found := sum(private, Counter[str]()):
                    last = found + files_by_kind(memory)
                    most |= last

        flags = model.training_flags(data, args.ranks, args.iterations)
        flags += _ALONE if args.ranks == 1 else []
        if windows != _PLAIN:
            flags += sparse_flags(memory, model.RUN_ID, windows)
        nodes = min(model.NODES, args.ranks)
        launch = Launch(output / windows, flags, nodes, args.ranks // nodes)
        log = train(launch, sample, Launcher.TORCHRUN).log
    slots = log.captured
    newest = slots[-slots[-1].window :] if slots else []
    captured = args.ranks * sum(slot.nbytes for slot in newest)
    return Account(windows, dict(most), dict(last), captured)


def reserve(folder: Path, tries: int) -> list[float]:
    """Return CPU seconds to reserve 1 GB (10^9 bytes) in a directory, ascending."""
    spent = []
    for number in range(tries):
        path = folder / f'moevement-reserve-{os.getpid()}-{number}'
        began = time.process_time()
        try:
            mapped = map_new(path, 10**9)
            spent.append(time.process_time() - began)
            mapped.close()
        finally:
            path.unlink(missing_ok=True)
    return sorted(spent)


def show(report: MemoryReport, console: Console) -> None:
    kinds = sorted({kind for one in report.accounts for kind in one.most})
    rows = [
        (kind, *(f'{one.most.get(kind, 0) / MIB:.1f}, {one.last.get(kind, 0) / MIB:.1f}'
                 for one in report.accounts))
        for kind in kinds
    ]  # fmt: skip
    rows.append(('window', *(f'{one.captured / MIB:.1f}' for one in report.accounts)))
    columns = ('MiB of all ranks (largest, last)', *(one.windows for one in report.accounts))
    console.print(table(columns, rows))


def measure(args: argparse.Namespace, console: Console) -> MemoryReport:
    output, data = prepare(args, 'host-memory')
    accounts = []
    for windows in [_PLAIN, *args.windows]:
        console.print(f'windows: {windows}', highlight=False)
        accounts.append(account(windows, data, output, args))
    return MemoryReport(args.ranks, args.iterations, accounts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog='python -m tools.bench.host_memory', description=__doc__)
    add = parser.add_argument
    add('--windows', nargs='+', default=['auto', '1', '4'], help='lengths (default: auto 1 4)')
    add('--ranks', type=int, choices=(1, *model.RANKS), default=2, help='1: without replicas')
    add('--iterations', type=int, default=24, help='iterations per run (default: 24)')
    add_output_flags(parser)
    add('--reserve', type=Path, metavar='DIR', help='measure reserving memory in this directory')
    args = parser.parse_args(argv)
    if args.reserve is not None:
        try:
            spent = reserve(args.reserve, _TRIES)
        except (OSError, HostMemoryError) as error:
            parser.error(f'--reserve {args.reserve}: {error}')
        print(f'CPU s per GB: {", ".join(f"{seconds:.3f}" for seconds in spent)}')
        return 0
    return run_benchmark('bench_host_memory', args, measure, show)


if __name__ == '__main__':
    exit_on_sigterm()
    sys.exit(main())
