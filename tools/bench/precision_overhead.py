# SPDX-License-Identifier: Apache-2.0
"""Measures what sparse checkpointing costs with narrow formats: bf16, and C1 to C5 of Table 7.

    python -m tools.bench.precision_overhead --json FILE    # a GPU with Transformer Engine
    python -m tools.bench.precision_overhead --stand-ins    # a CPU, with stand-ins for it

In each configuration the model of `tools.bench.overhead` trains without protection and with it,
in turns over several rounds; ratios are taken within a round. All runs of a configuration must end
in the same bits. What a window takes is compared with that of bf16, beside what the same formats
would take by the bytes of the paper's Table 7; a model whose embeddings are large keeps more in 16
bits than theirs.

Exit status: 0 done, 1 the final states of a configuration differ, 2 a run failed.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tools.bench.overhead import PLAIN, SPARSE, Bench, Run
from tools.lab import precisions
from tools.lab.arguments import Parser
from tools.lab.benchmark import exit_on_sigterm, run_benchmark
from tools.lab.figures import Spread
from tools.lab.hardware import Hardware
from tools.lab.models import prepare_text
from tools.plan.layout import PRECISIONS
from tools.simulate.paper.memory import DENSE_BYTES, LIGHT_BYTES, slot_bytes
from tools.simulate.paper.tables import ettr_tables

_RANKS = 2
_MIB = 1 << 20


class Row(msgspec.Struct, frozen=True):
    """One configuration over all rounds."""

    name: str
    iteration_ms: Spread
    """Without protection."""
    ratio: Spread
    """Iteration time over that without protection in the same round."""
    cpu_ratio: Spread
    exposed_ms: Spread
    slot_bytes: list[int]
    """Each slot of the last window of the last rank."""
    window_mib: float
    """All of them."""
    window_over_bf16: float
    """Bytes of that window over those of bf16."""
    expected_over_bf16: float
    """The same by bytes a parameter, if every weight had the format."""
    paper_over_bf16: float
    """The same by the bytes that the paper counts."""
    identical: bool
    """All runs ended in the same bits."""


class PrecisionOverheadReport(msgspec.Struct, frozen=True):
    """All configurations, on one machine."""

    hardware: Hardware
    stand_ins: bool
    """The formats are emulated; nothing here is Transformer Engine's."""
    window: int
    iterations: int
    warm_up: int
    rounds: int
    rows: list[Row]


def window_over_bf16(window: int, full: float, light: float) -> float:
    """Bytes of a window over those in bf16, when operators are equal.

    Args:
        window: W.
        full: bytes of a parameter whose state is captured.
        light: bytes of one whose weight is captured.
    """
    ours = slot_bytes(window, full, light).sum()
    return float(ours / slot_bytes(window, DENSE_BYTES, LIGHT_BYTES).sum())


def row(name: str, rounds: Sequence[tuple[Run, Run]], window: int, bf16_bytes: int | None) -> Row:
    """What the runs of one configuration say.

    Args:
        name: one of `precisions.FLAGS`.
        rounds: of each the run without protection and the one with it.
        window: W.
        bf16_bytes: that the last rank's window took in bf16; None for bf16 itself.
    """
    slots = rounds[-1][1].slot_bytes
    formats, paper = PRECISIONS[name], _paper_bytes(name)
    return Row(
        name=name,
        iteration_ms=Spread.of([1000 * plain.iteration_s for plain, _ in rounds]),
        ratio=Spread.of([sparse.iteration_s / plain.iteration_s for plain, sparse in rounds]),
        cpu_ratio=Spread.of([sparse.cpu_s / plain.cpu_s for plain, sparse in rounds]),
        exposed_ms=Spread.of(
            [sparse.exposed_ms for _, sparse in rounds if sparse.exposed_ms is not None]
        ),
        slot_bytes=slots,
        window_mib=sum(slots) / _MIB,
        window_over_bf16=sum(slots) / (bf16_bytes or sum(slots)),
        expected_over_bf16=window_over_bf16(window, formats.full_bytes, formats.light_bytes),
        paper_over_bf16=window_over_bf16(window, *paper),
        identical=len({run.digest for runs in rounds for run in runs}) == 1,
    )


def _paper_bytes(name: str) -> tuple[int, int]:
    if name == 'bf16':
        return DENSE_BYTES, LIGHT_BYTES
    setting = ettr_tables()['Table 7'].setting(name.upper())
    return setting.full_bytes, setting.light_bytes


def measure(args: argparse.Namespace, console: Console) -> PrecisionOverheadReport:
    """Train all of them, in turns.

    Raises:
        LabError: a run failed.
    """
    output = args.output.resolve() / 'precision-overhead'
    shutil.rmtree(output, ignore_errors=True)
    data = prepare_text(args.output.resolve() / 'data')
    runs: dict[str, list[tuple[Run, Run]]] = {name: [] for name in precisions.FLAGS}
    for number in range(1, args.rounds + 1):
        for name, done in runs.items():
            (folder := output / name).mkdir(parents=True, exist_ok=True)
            bench = Bench(
                data,
                folder,
                _RANKS,
                args.iterations,
                args.warm_up,
                str(args.window),
                precision=name,
                program_file=precisions.program(args.stand_ins),
                share_gpu=not args.stand_ins,
            )
            done.append((bench.run(PLAIN, number), bench.run(SPARSE, number)))
            plain, sparse = (1000 * run.iteration_s for run in done[-1])
            console.print(
                f'round {number}: {name}: {plain:.0f} ms, protected {sparse:.0f} ms',
                highlight=False,
            )
    bf16_bytes = sum(runs['bf16'][-1][1].slot_bytes)
    return PrecisionOverheadReport(
        Hardware.here(gpu=not args.stand_ins),
        args.stand_ins,
        args.window,
        args.iterations,
        args.warm_up,
        args.rounds,
        [row(name, done, args.window, bf16_bytes) for name, done in runs.items()],
    )


def print_report(report: PrecisionOverheadReport, console: Console) -> None:
    """A table."""
    what = 'stand-ins for Transformer Engine' if report.stand_ins else 'Transformer Engine'
    table = Table(title=f'W = {report.window} on {what}, {report.hardware.line()}')
    for heading in (
        'configuration',
        'iteration (ms)',
        'protected over that',
        'CPU time',
        'exposed (ms)',
        'window (MiB)',
        'window over bf16',
        'all weights so',
        'paper',
    ):
        table.add_column(heading, justify='left' if heading == 'configuration' else 'right')
    for one in report.rows:
        table.add_row(
            one.name,
            one.iteration_ms.text(0),
            one.ratio.text(),
            one.cpu_ratio.text(),
            one.exposed_ms.text(1),
            f'{one.window_mib:.1f}',
            f'{one.window_over_bf16:.2f}',
            f'{one.expected_over_bf16:.2f}',
            f'{one.paper_over_bf16:.2f}',
        )
    console.print(table)
    different = [one.name for one in report.rows if not one.identical]
    verdict = f'[bold red]DIFFERENT in {", ".join(different)}[/]' if different else 'equal'
    console.print(f'Final states of all runs of a configuration: {verdict}.', highlight=False)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked; exits with a message if they are wrong."""
    parser = Parser(
        prog='python -m tools.bench.precision_overhead',
        description=__doc__,
    )
    parser.add_argument('--rounds', type=int, default=3, help='turns of all (default: 3)')
    parser.add_argument('--iterations', type=int, default=12, help='per run (default: 12)')
    parser.add_argument('--warm-up', type=int, default=4, help='to drop of each run (default: 4)')
    parser.add_argument('--window', type=int, default=4, help='W (default: 4)')
    parser.add_argument('--output', type=Path, default=Path('runs/bench'), help='folder for logs')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write everything here')
    precisions.add_stand_ins(parser)
    args = parser.parse_args(argv)
    for flag, least in (('rounds', 1), ('warm_up', 1), ('window', 1)):
        if getattr(args, flag) < least:
            name = flag.replace('_', '-')
            parser.error(f'--{name} {getattr(args, flag)}: must be at least {least}')
    if args.iterations < args.warm_up + max(args.window, 3):
        parser.error(
            f'--iterations {args.iterations}: must be at least --warm-up + --window, and + 3'
        )
    precisions.check_stand_ins(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    return run_benchmark(
        'bench_precision_overhead',
        lambda console: measure(args, console),
        print_report,
        args.json,
        passed=lambda report: all(one.identical for one in report.rows),
    )


if __name__ == '__main__':
    exit_on_sigterm()
    sys.exit(main())
