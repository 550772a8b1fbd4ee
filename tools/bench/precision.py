# SPDX-License-Identifier: Apache-2.0
"""What narrow formats cost in accuracy: the same toy model in each configuration of Table 7.

    python -m tools.bench.precision --json precision.json      # a GPU with Transformer Engine
    python -m tools.bench.precision --stand-ins                # a CPU, with stand-ins for it

A GPT of half a million parameters trains on the text of the standard library: in bf16, in bf16 from
another seed, and in C1 to C5. The loss is that of the last iterations, averaged; the second bf16
run says how much of a difference is chance. What no number can be given for has become NaN.

Exit status: 0 done, 2 a run failed.
"""

import argparse
import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tools.lab import models, precisions
from tools.lab.arguments import Parser
from tools.lab.benchmark import exit_on_sigterm, run_benchmark
from tools.lab.errors import LabError
from tools.lab.hardware import Hardware
from tools.lab.job import Job
from tools.lab.launch import Launch
from tools.lab.run_log import RunLog
from tools.plan.layout import PRECISIONS

_MODEL = models.ToyModel(hidden=64, heads=4, sequence=64, experts=4)
_TRAINING = (
    '--num-layers 2 --untie-embeddings-and-output-weights --micro-batch-size 8 '
    '--global-batch-size 16 --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 10 --clip-grad 1.0'
).split()
_SHARE = 10
"""The last tenth of the iterations is averaged."""
AGAIN = 'bf16, another seed'
NAMES = ('bf16', AGAIN, *(name for name in precisions.FLAGS if name != 'bf16'))


class Row(msgspec.Struct, frozen=True):
    """One configuration."""

    name: str
    flags: str
    """Flags of Megatron, besides those of the model."""
    bytes_full: int
    """A parameter takes so many in a window, without scales."""
    first_loss: float
    """The loss of the first iteration."""
    loss: float | None
    """Mean over the last ones; None: it became NaN."""
    over_bf16: float | None
    """Difference to the first run in bf16."""


class PrecisionReport(msgspec.Struct, frozen=True):
    """All configurations, on one machine."""

    hardware: Hardware
    stand_ins: bool
    """The formats are emulated; nothing here is Transformer Engine's."""
    iterations: int
    averaged: int
    """How many of the last ones a loss is the mean of."""
    rows: list[Row]


def final_loss(log: RunLog, iterations: int) -> float | None:
    """Mean over the last iterations; None if one of them is no number, which is not logged as one.

    Raises:
        LabError: the job did not come that far.
    """
    trained = [item for life in log.lives for item in life]
    last = [item.loss for item in trained if item.number > iterations - averaged(iterations)]
    if not trained:
        raise LabError('no iteration with a loss that is a number was logged')
    whole = len(last) == averaged(iterations) and all(map(math.isfinite, last))
    return statistics.fmean(last) if whole else None


def averaged(iterations: int) -> int:
    """How many of the last iterations count."""
    return max(iterations // _SHARE, 1)


def training_flags(name: str, data: Path, iterations: int, stand_ins: bool) -> list[str]:
    """Megatron's flags for one of `NAMES`; the last of a flag counts."""
    again = name == AGAIN
    return [
        *_MODEL.flags(),
        *models.TRAINING,
        *_TRAINING,
        *models.TEXT,
        *models.NO_EVALUATION,
        *models.data_flags(data),
        *('--train-iters', str(iterations), '--lr-decay-iters', str(iterations)),
        *precisions.FLAGS['bf16' if again else name].split(),
        *(('--seed', '4321') if again else ()),
        *(() if stand_ins else precisions.ENGINE),
    ]


def measure(args: argparse.Namespace, console: Console) -> PrecisionReport:
    """Train all of them, one after the other.

    Raises:
        LabError: a run failed.
    """
    output = args.output.resolve() / 'precision'
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    data = models.prepare_text(args.output.resolve() / 'data')
    rows: list[Row] = []
    for number, name in enumerate(NAMES):
        flags = training_flags(name, data, args.iterations, args.stand_ins)
        launch = Launch(
            output / f'run{number}',
            flags,
            nodes=1,
            workers_per_node=1,
            share_gpu=not args.stand_ins,
            program_file=precisions.program(args.stand_ins),
        )
        with Job(launch) as job:
            log = job.finish()
        rows.append(row(name, log, args.iterations, rows))
        console.print(f'{name}: {shown(rows[-1].loss)}', highlight=False)
    count = averaged(args.iterations)
    hardware = Hardware.here(gpu=not args.stand_ins)
    return PrecisionReport(hardware, args.stand_ins, args.iterations, count, rows)


def row(name: str, log: RunLog, iterations: int, before: Sequence[Row]) -> Row:
    """What one run says, compared with the first of those before it."""
    loss = final_loss(log, iterations)
    reference = before[0].loss if before else loss
    over = None if loss is None or reference is None else loss - reference
    kind = 'bf16' if name == AGAIN else name
    return Row(
        name,
        precisions.FLAGS[kind],
        PRECISIONS[kind].full_bytes,
        log.lives[0][0].loss,
        loss,
        over,
    )


def shown(loss: float | None, sign: str = '') -> str:
    """With three digits, or NaN."""
    return 'NaN' if loss is None else f'{loss:{sign}.3f}'


def print_report(report: PrecisionReport, console: Console) -> None:
    """A table."""
    what = 'stand-ins for Transformer Engine' if report.stand_ins else 'Transformer Engine'
    table = Table(title=f'{report.iterations} iterations on {what}, {report.hardware.line()}')
    for heading in ('configuration', 'bytes a parameter', 'loss at first', 'loss', 'over bf16'):
        table.add_column(heading, justify='left' if heading == 'configuration' else 'right')
    for one in report.rows:
        table.add_row(
            one.name,
            str(one.bytes_full),
            shown(one.first_loss),
            shown(one.loss),
            shown(one.over_bf16, '+'),
        )
    console.print(table)
    console.print(
        f'Loss: mean of the last {report.averaged} iterations. A difference that is no larger than '
        'that of the other seed may be chance.',
        highlight=False,
        soft_wrap=True,
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked; exits with a message if they are wrong."""
    parser = Parser(
        prog='python -m tools.bench.precision',
        description=__doc__,
    )
    parser.add_argument('--iterations', type=int, default=300, help='of each run (default: 300)')
    parser.add_argument('--output', type=Path, default=Path('runs/bench'), help='folder for logs')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write everything here')
    precisions.add_stand_ins(parser)
    args = parser.parse_args(argv)
    if args.iterations < 20:
        parser.error(f'--iterations {args.iterations}: must be at least 20')
    precisions.check_stand_ins(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    return run_benchmark(
        'bench_precision',
        lambda console: measure(args, console),
        print_report,
        args.json,
        passed=lambda report: True,
    )


if __name__ == '__main__':
    exit_on_sigterm()
    sys.exit(main())
