# SPDX-License-Identifier: Apache-2.0
"""Results of `bench.overhead`, by way to protect a run or by format: ratios and tables."""

import math
import statistics
from collections.abc import Sequence

import msgspec
from rich.console import Console

from ..lab.figures import Spread
from ..lab.hardware import Hardware
from ..lab.run_log import RunLog
from ..lab.tables import say, table

PLAIN, SPARSE, AGAINST = 'plain', 'sparse', 'sparse-against'
DISK = 'sparse-disk'
DENSE_IN_MEMORY = 'dense-in-memory'
SYNC, ASYNC = 'torch-dist-sync', 'torch-dist-async'
TITLES = {
    PLAIN: 'plain Megatron',
    SPARSE: 'sparse checkpointing',
    AGAINST: 'sparse checkpointing of the other checkout',
    DISK: 'sparse checkpointing, windows also to disk',
    DENSE_IN_MEMORY: 'dense in host memory each time (window 1)',
    SYNC: 'torch_dist each time',
    ASYNC: 'torch_dist each time, asynchronous',
}
# The loss is averaged over the last tenth of the iterations.
_SHARE = 10
_MIB = 1 << 20


class Run(msgspec.Struct, frozen=True):
    """One run of one variant, without its warm-up."""

    variant: str
    iteration_s: float
    """Median seconds of an iteration."""
    all_iterations_s: list[float]
    cpu_s: float
    """CPU seconds of an iteration, per rank."""
    helpers_s: float
    """CPU seconds of Python threads other than the training thread; 0 in plain Megatron."""
    exposed_ms: float | None
    """Mean exposed time of an iteration, as the last rank logs it."""
    windows: list[int]
    """W of each iteration."""
    slot_bytes: list[int]
    """Bytes of each slot in the last window of the last rank."""
    digest: str
    on_disk: int = 0
    """Number of windows that all ranks had on disk."""
    loss: float | None = None
    """Mean over the last tenth of the iterations; None after a NaN."""


def final_loss(log: RunLog, iterations: int) -> float | None:
    """Mean over the last iterations; None if one of them has no loss in the log, which is a NaN."""
    count = max(iterations // _SHARE, 1)
    last = [item.loss for item in log.iterations if item.number > iterations - count]
    whole = len(last) == count and all(map(math.isfinite, last))
    return statistics.fmean(last) if whole else None


class Variant(msgspec.Struct, frozen=True):
    """One way to protect runs of one precision, over all rounds."""

    title: str
    iteration_ms: Spread
    ratio: Spread
    """Iteration time divided by that of plain Megatron in the same round."""
    cpu_s: Spread
    cpu_ratio: Spread
    helpers: Spread
    """CPU time that helper threads add, divided by all of plain Megatron's in the same round."""
    exposed_ms: Spread | None
    windows: list[int]
    """Values of W during the run."""
    slot_bytes: list[int]
    """Bytes of each slot in the last window of the last rank."""
    loss: float | None


class OverheadReport(msgspec.Struct, frozen=True):
    """Results of all variants; mappings are keyed by precision."""

    hardware: Hardware
    ranks: int
    iterations: int
    warm_up: int
    window: str
    stand_ins: bool | None
    """True if formats are emulated; None without formats."""
    identical: dict[str, bool]
    """True if all runs ended in the same bits."""
    variants: dict[str, dict[str, Variant]]
    rounds: dict[str, list[list[Run]]]

    @property
    def exact(self) -> bool:
        return all(self.identical.values())


def variants_of(rounds: Sequence[Sequence[Run]]) -> dict[str, Variant]:
    by_round = [{run.variant: run for run in runs} for runs in rounds]
    return {name: _variant(name, by_round) for name in by_round[0]}


def _variant(name: str, rounds: Sequence[dict[str, Run]]) -> Variant:
    runs = [runs[name] for runs in rounds]
    exposed = [run.exposed_ms for run in runs if run.exposed_ms is not None]
    return Variant(
        title=TITLES[name],
        iteration_ms=Spread.of([1000 * run.iteration_s for run in runs]),
        ratio=Spread.of([runs[name].iteration_s / runs[PLAIN].iteration_s for runs in rounds]),
        cpu_s=Spread.of([run.cpu_s for run in runs]),
        cpu_ratio=Spread.of([runs[name].cpu_s / runs[PLAIN].cpu_s for runs in rounds]),
        helpers=Spread.of([runs[name].helpers_s / runs[PLAIN].cpu_s for runs in rounds]),
        exposed_ms=Spread.of(exposed) if exposed else None,
        windows=sorted({window for run in runs for window in run.windows}),
        slot_bytes=runs[-1].slot_bytes,
        loss=runs[-1].loss,
    )


def identical(rounds: Sequence[Sequence[Run]]) -> bool:
    return len({run.digest for runs in rounds for run in runs}) == 1


def print_report(report: OverheadReport, console: Console) -> None:
    engine = {None: '', True: ', stand-ins for Transformer Engine', False: ', Transformer Engine'}
    say(console, report.hardware.line() + engine[report.stand_ins])
    columns = (
        'precision', '', '>iteration (ms)', '>ratio', '>CPU s / rank', '>CPU ratio',
        '>helpers', '>exposed (ms)', '>slots (MiB)', '>loss',
    )  # fmt: skip
    rows = [
        (precision, *_cells(variant))
        for precision, variants in report.variants.items()
        for variant in variants.values()
    ]
    console.print(table(columns, rows))
    rounds = len(next(iter(report.rounds.values())))
    say(
        console,
        f'{report.ranks} ranks on 2 emulated nodes, {rounds} rounds of {report.iterations} '
        f'iterations, the first {report.warm_up} dropped; per round the median, over rounds the '
        'median (and the range). Slots are those of the last window of the last rank; one slot is '
        'what a dense checkpoint takes. Helpers: CPU time of Python threads other than the '
        "training thread, over all of plain Megatron's. "
        'Losses: mean of the last tenth of the iterations.',
    )
    different = [precision for precision, same in report.identical.items() if not same]
    verdict = f'DIFFERENT in {", ".join(different)}' if different else 'equal'
    say(console, f'Final states of all runs of a precision, bit for bit: {verdict}.')


def _cells(variant: Variant) -> tuple[str, ...]:
    windows = f', window {", ".join(map(str, variant.windows))}' if variant.windows else ''
    return (
        variant.title + windows,
        variant.iteration_ms.text(0),
        variant.ratio.text(3),
        variant.cpu_s.text(),
        variant.cpu_ratio.text(),
        variant.helpers.text(3),
        variant.exposed_ms.text(1) if variant.exposed_ms else '-',
        ' '.join(f'{nbytes / _MIB:.1f}' for nbytes in variant.slot_bytes) or '-',
        'NaN' if variant.loss is None else f'{variant.loss:.3f}',
    )
