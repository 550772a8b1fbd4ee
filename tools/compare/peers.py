# SPDX-License-Identifier: Apache-2.0
"""Compares this project with other projects, unmodified, that protect the same trainer.

    scripts/peers.sh && moevement compare peers
    moevement compare peers --rows plain,localized-spare,nvrx-in-job --json peers.json

A small GPT trains on 2 ranks; every row protects every iteration, without limits on copies. In each
round every row runs once: the tool measures iterations and CPU time, samples memory, then kills one
rank (SIGKILL) and measures the seconds until the end of the first new iteration. The report shows
the load of the machine, which affects all figures.

Rows with two pipeline stages are compared with plain Megatron on two stages. lm-resiliency 0.2.0
restores different iterations on different stages, so it runs with data parallelism, and has its own
plain run.

Exit status: 0 done, 1 a row of this project ended with other bits, 2 no result.
"""

import argparse
import os
import shutil
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from ..lab import four_ranks, tables
from ..lab.arguments import Parser, at_least
from ..lab.benchmark import add_output_flags, prepare, run_benchmark
from ..lab.cpu_clock import Spent, memory_bytes, spent
from ..lab.errors import LabError
from ..lab.figures import Spread
from ..lab.hardware import Hardware
from ..lab.job import Job, Trained, memory_directory, train
from ..lab.run_log import RunLog
from ..lab.tables import say, table
from . import running
from .peer_rows import CANNOT, PEERS, PLAIN, PLAIN_DATA, RANKS, SITE, InJob, PeerRow

_PROG = 'moevement compare peers'
_FIRST, _KILL_AFTER, _ITERATIONS, _VICTIM = 4, 12, 40, 1
# Digits of each column of figures.
_DIGITS = {
    'ratio': 2, 'cpu': 2, 'cpu_training': 2, 'tmpfs_mb': 1, 'logs_mb': 1, 'memory_mb': 0,
    'back_s': 1, 'start_s': 1, 'load': 0,
}  # fmt: skip
COLUMNS = (
    'iteration', 'CPU', 'training thread', 'tmpfs MB', 'logs MB', 'memory MB', 'back s', 'start',
    'again', 'bits', 'load',
)  # fmt: skip


class PeerFigures(msgspec.Struct, frozen=True):
    """One row in one round."""

    ratio: float
    """Seconds of an iteration over those of plain Megatron."""
    cpu: float
    """CPU seconds of all processes over those of plain Megatron."""
    cpu_training: float
    """The same ratio, for the training threads alone."""
    tmpfs_mb: float
    """Pages of files in the tmpfs, without logs of what stages send."""
    logs_mb: float
    memory_mb: float
    """Anonymous memory of all processes beyond that of plain Megatron."""
    back_s: float | None
    """Seconds from SIGKILL to the first new iteration; None: not killed."""
    start_s: float
    """Part of `back_s`, until the last new process ran the program."""
    again: int
    """Iterations that were logged again."""
    different: list[str]
    """Kinds of state that differ from plain Megatron at the end."""
    load: float


class PeerResult(msgspec.Struct, frozen=True):
    """One row, over all rounds."""

    title: str
    ours: bool
    figures: dict[str, Spread]
    """By name of the column."""
    again: float
    different: list[str]


class PeerReport(msgspec.Struct, frozen=True):
    """The whole report."""

    hardware: Hardware
    rounds: int
    rows: dict[str, PeerResult]
    cannot: dict[str, tuple[str, str]]
    """Reason, and the command or log that shows it, by row that did not run."""

    @property
    def exact(self) -> bool:
        return not any(row.ours and row.different for row in self.rows.values())


class _Ran:
    """A job, with samples taken while it trained."""

    def __init__(self) -> None:
        self.samples: list[Spent] = []
        self.memory = self.tmpfs = self.logs = 0
        self.killed: float | None = None
        self.load = os.getloadavg()[0]

    def watch(self, job: Job, memory: Path, kill: bool) -> float:
        """Sample the job, and kill a rank; returns the time."""
        for number in (_FIRST, _KILL_AFTER):
            job.await_iteration(number)
            self.samples.append(spent([pid for pid in job.pids() if pid]))
        self.memory = memory_bytes([pid for pid in job.pids() if pid])
        self.logs, self.tmpfs = file_bytes(memory)
        self.killed = job.send([_VICTIM], signal.SIGKILL) if kill else None
        return self.killed or self.samples[-1].time


def file_bytes(root: Path) -> tuple[int, int]:
    """Bytes of the logs of a run, and of its other files; a file renamed meanwhile is left out."""
    logs = others = 0
    for path in root.rglob('*'):
        try:
            nbytes = 512 * path.stat().st_blocks if path.is_file() else 0
        except OSError:
            continue
        if path.name == 'upstream-log':
            logs += nbytes
        else:
            others += nbytes
    return logs, others


class PeerRuns:
    """Runs rows on the same model and text; plain Megatron before the rows beside it."""

    def __init__(self, data: Path, output: Path) -> None:
        self._data, self._output = data, output
        self._plain: dict[bool, tuple[_Ran, Trained]] = {}

    def run(self, number: int, name: str, row: PeerRow) -> PeerFigures:
        """Run a row. Raises LabError: the job failed, or did not recover."""
        folder, ran = self._output / f'{number}-{name}', _Ran()
        plain = name in (PLAIN, PLAIN_DATA)
        with memory_directory('moevement-peers-') as memory:
            launch = row.launch(folder, memory, self._flags(row))
            trained = train(launch, lambda job: ran.watch(job, memory, not plain), row.starts)
        shutil.rmtree(folder / 'checkpoints', ignore_errors=True)
        if plain:
            self._plain[row.replicas_of_data] = ran, trained
        return compared(ran, trained, *self._plain[row.replicas_of_data], running.starts(folder))

    def _flags(self, row: PeerRow) -> list[str]:
        stages = '1' if row.replicas_of_data else str(RANKS)
        return [
            *four_ranks.training_flags(self._data, _ITERATIONS),
            *('--pipeline-model-parallel-size', stages, '--expert-model-parallel-size', '1'),
        ]


def compared(
    ran: _Ran, trained: Trained, beside: _Ran, plain: Trained, started: Sequence[float]
) -> PeerFigures:
    """Figures of a job, relative to plain Megatron in the same round.

    Raises LabError: no new iteration came after the kill.
    """
    mine, other = (one.samples[1] - one.samples[0] for one in (ran, beside))
    log, back, start, again = trained.log, None, 0.0, 0
    if ran.killed is not None:
        killed = ran.killed
        before = log.newest_until(killed)
        new = log.first_after(before)
        back = new.time - killed
        start = max((time for time in started if killed < time < new.time), default=killed) - killed
        again = sum(item.time > killed and item.number <= before for item in log.iterations)
    return PeerFigures(
        ratio=_pace_s(log) / _pace_s(plain.log),
        cpu=mine.total_s / other.total_s,
        cpu_training=mine.training_s / other.training_s,
        tmpfs_mb=ran.tmpfs / 1e6,
        logs_mb=ran.logs / 1e6,
        memory_mb=(ran.memory - beside.memory) / 1e6,
        back_s=back,
        start_s=start,
        again=again,
        different=trained.different(plain),
        load=ran.load,
    )


def _pace_s(log: RunLog) -> float:
    """Median seconds of the iterations before the kill."""
    times = [item.time for item in log.iterations if _FIRST <= item.number <= _KILL_AFTER]
    first_attempt = times[: _KILL_AFTER - _FIRST + 1]
    return statistics.median(
        after - before for before, after in zip(first_attempt, first_attempt[1:], strict=False)
    )


def over_rounds(row: PeerRow, runs: Sequence[PeerFigures]) -> PeerResult:
    """Figures over all rounds; ratios were taken within each."""
    known = {name: [v for run in runs if (v := getattr(run, name)) is not None] for name in _DIGITS}
    return PeerResult(
        row.title, row.ours, {name: Spread.of(values) for name, values in known.items() if values},
        statistics.mean(run.again for run in runs),
        sorted({kind for run in runs for kind in run.different}),
    )  # fmt: skip


def cells(row: PeerResult) -> list[str]:
    found = {name: row.figures[name].text(n) for name, n in _DIGITS.items() if name in row.figures}
    load = found.pop('load')
    if 'back_s' in found:
        found['again'] = f'{row.again:.1f}'
    else:  # not killed
        found |= dict.fromkeys(('back_s', 'start_s', 'again'), '-')
    bits = f'differ: {", ".join(row.different)}' if row.different else 'equal'
    return [*found.values(), bits, load]


def print_report(report: PeerReport, console: Console) -> None:
    say(console, report.hardware.line())
    columns = ['', *(f'>{column}' for column in COLUMNS)]
    rows = [(row.title, *cells(row)) for row in report.rows.values()]
    wide = Console(file=console.file, width=max(console.width, 200))
    wide.print(table(columns, rows), soft_wrap=True)
    say(console, f'{RANKS} ranks, {report.rounds} rounds; iteration and CPU: over plain Megatron.')
    for name, (why, shown) in report.cannot.items():
        say(console, f'{name}: {why}\n    {shown}')


def markdown(report: PeerReport) -> str:
    rows = ((row.title, *cells(row)) for row in report.rows.values())
    return tables.markdown(('', *COLUMNS), rows)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=_PROG, description=__doc__)
    add = parser.add_argument
    add('--rows', default=','.join(PEERS), help=f'some of {",".join(PEERS)} (default: all)')
    add('--rounds', type=at_least(1), default=3, help='rounds over all rows (default: 3)')
    add_output_flags(parser, 'runs/compare')
    add('--table', type=Path, metavar='FILE', help='write the table here, for a document')
    args = parser.parse_args(argv)
    names = set(args.rows.split(','))
    if unknown := names - PEERS.keys():
        parser.error(f'--rows: no row {", ".join(unknown)}; there are {", ".join(PEERS)}')
    names |= {PLAIN_DATA if PEERS[name].replicas_of_data else PLAIN for name in names}
    args.rows = {name: row for name, row in PEERS.items() if name in names}
    theirs = [row.title for row in args.rows.values() if row.lm_resiliency or row.starts is InJob]
    if theirs and not SITE.is_dir():
        parser.error(f'{theirs[0]} is not installed: scripts/peers.sh')
    return args


def measure(args: argparse.Namespace, console: Console) -> PeerReport:
    hardware = Hardware.here(gpu=False)
    output, data = prepare(args, 'peers')
    bench = PeerRuns(data, output)
    found: dict[str, list[PeerFigures]] = {name: [] for name in args.rows}
    cannot = dict(CANNOT)
    for number in range(1, args.rounds + 1):
        for name, row in args.rows.items():
            try:
                one = bench.run(number, name, row)
            except LabError as error:
                if name in (PLAIN, PLAIN_DATA):
                    raise
                cannot[row.title] = (str(error), f'logs of {output / f"{number}-{name}"}')
                console.print(f'{number}: {row.title}: {error}', highlight=False, markup=False)
                continue
            found[name].append(one)
            back = '' if one.back_s is None else f', back in {one.back_s:.1f} s'
            console.print(f'{number}: {one.ratio:.2f}{back}  {row.title}', highlight=False,
                          markup=False)  # fmt: skip
    rows = {name: over_rounds(args.rows[name], runs) for name, runs in found.items() if runs}
    return PeerReport(hardware, args.rounds, rows, cannot)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)

    def show(report: PeerReport, console: Console) -> None:
        print_report(report, console)
        if args.table:
            args.table.write_text(markdown(report), 'utf-8')

    return run_benchmark('compare peers', args, measure, show)


if __name__ == '__main__':
    sys.exit(main())
