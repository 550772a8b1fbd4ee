# SPDX-License-Identifier: Apache-2.0
"""What `bench.overhead` finds: of ways to protect a run, or of formats; ratios and tables."""

import math
import statistics
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from tools.lab.figures import Spread
from tools.lab.hardware import Hardware
from tools.lab.run_log import RunLog

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
_SHARE = 10
"""The losses of the last tenth of the iterations are averaged."""
_MIB = 1 << 20


class Run(msgspec.Struct, frozen=True):
    """One run of one variant, warm-up dropped."""

    variant: str
    iteration_s: float
    """Median."""
    all_iterations_s: list[float]
    cpu_s: float
    """CPU seconds of an iteration, per rank."""
    exposed_ms: float | None
    """Mean exposed time of an iteration, from the log of sparse checkpointing on the last rank."""
    windows: list[int]
    """W of each iteration."""
    slot_bytes: list[int]
    """Bytes of each slot in the last window of the last rank."""
    digest: str
    on_disk: int = 0
    """Windows that all ranks had on disk."""
    loss: float | None = None
    """Mean over the last tenth of the iterations; None: it became NaN."""


def final_loss(log: RunLog, iterations: int) -> float | None:
    """Mean over the last iterations; None if one of them is no number, which is not logged as one.

    Args:
        log: of the run.
        iterations: that it was to train.
    """
    count = max(iterations // _SHARE, 1)
    last = [item.loss for item in log.iterations if item.number > iterations - count]
    whole = len(last) == count and all(map(math.isfinite, last))
    return statistics.fmean(last) if whole else None


# ---- ways to protect


class Variant(msgspec.Struct, frozen=True):
    """One variant over all rounds."""

    title: str
    iteration_ms: Spread
    ratio: Spread
    """Iteration time over that of plain Megatron in the same round."""
    cpu_s: Spread
    cpu_ratio: Spread
    exposed_ms: Spread | None
    windows: list[int]
    """That were in force."""


class SlotBytes(msgspec.Struct, frozen=True):
    """What the last rank captures per iteration."""

    dense: int
    mean: float
    max: int
    mean_over_dense: float
    max_over_dense: float


class OverheadReport(msgspec.Struct, frozen=True):
    """Everything that was found."""

    hardware: Hardware
    ranks: int
    iterations: int
    warm_up: int
    window: str
    identical: bool
    variants: dict[str, Variant]
    slot_bytes: SlotBytes
    rounds: list[list[Run]]


def variants_of(rounds: Sequence[Sequence[Run]]) -> dict[str, Variant]:
    """Ratios within each round, then over the rounds."""
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
        exposed_ms=Spread.of(exposed) if exposed else None,
        windows=sorted({window for run in runs for window in run.windows}),
    )


def slot_bytes_of(runs: Sequence[Run]) -> SlotBytes:
    """A window of one slot holds everything in full: what a dense checkpoint takes."""
    by_name = {run.variant: run for run in runs}
    dense = max(by_name[DENSE_IN_MEMORY].slot_bytes)
    slots = by_name[SPARSE].slot_bytes
    mean = statistics.mean(slots)
    return SlotBytes(dense, mean, max(slots), mean / dense, max(slots) / dense)


def identical(rounds: Sequence[Sequence[Run]]) -> bool:
    """Whether all runs ended in the same bits."""
    return len({run.digest for runs in rounds for run in runs}) == 1


def print_report(report: OverheadReport, console: Console) -> None:
    """For people."""
    console.print(report.hardware.line(), highlight=False, soft_wrap=True)
    table = Table()
    for column in ('', 'iteration (ms)', 'ratio', 'CPU s / rank', 'CPU ratio', 'exposed (ms)'):
        table.add_column(column, justify='right' if column else 'left')
    for name, variant in report.variants.items():
        windows = f', window {", ".join(map(str, variant.windows))}' if name == SPARSE else ''
        table.add_row(
            variant.title + windows,
            variant.iteration_ms.text(0),
            variant.ratio.text(3),
            variant.cpu_s.text(),
            variant.cpu_ratio.text(),
            variant.exposed_ms.text(1) if variant.exposed_ms else '-',
        )
    console.print(table)
    slots = report.slot_bytes
    console.print(
        f'Bytes per iteration on the last rank: dense {slots.dense / _MIB:.1f} MiB; slots '
        f'{slots.mean / _MIB:.1f} MiB on average ({slots.mean_over_dense:.0%}), '
        f'{slots.max / _MIB:.1f} MiB at most ({slots.max_over_dense:.0%}).\n'
        f'{report.ranks} ranks on 2 emulated nodes, {len(report.rounds)} rounds of '
        f'{report.iterations} iterations, the first {report.warm_up} dropped; per round the '
        'median, over rounds the median (and the range).',
        highlight=False,
        soft_wrap=True,
    )
    verdict = 'equal, bit for bit' if report.identical else '[bold red]DIFFERENT[/]'
    console.print(f'Final states of all runs: {verdict}.', highlight=False)


# ---- formats


class Format(msgspec.Struct, frozen=True):
    """One configuration over all rounds, protected and not."""

    name: str
    bytes_full: int
    """A parameter takes so many in a window, without scales."""
    iteration_ms: Spread
    """Without protection."""
    ratio: Spread
    """Iteration time over that without protection in the same round."""
    cpu_ratio: Spread
    exposed_ms: Spread
    window_mib: float
    """Bytes of the last window of the last rank."""
    window_over_bf16: float
    loss: float | None
    """Mean over the last tenth of the iterations; None: it became NaN."""
    loss_over_bf16: float | None
    identical: bool
    """All runs ended in the same bits."""


class FormatsReport(msgspec.Struct, frozen=True):
    """All configurations, on one machine."""

    hardware: Hardware
    stand_ins: bool
    """The formats are emulated; nothing here is Transformer Engine's."""
    window: str
    iterations: int
    warm_up: int
    rounds: int
    formats: list[Format]

    @property
    def identical(self) -> bool:
        """Whether all runs of each configuration ended in the same bits."""
        return all(one.identical for one in self.formats)


def format_of(
    name: str, bytes_full: int, rounds: Sequence[Sequence[Run]], first: Format | None
) -> Format:
    """What the runs of one configuration say.

    Args:
        name: of the configuration.
        bytes_full: of a parameter in a window.
        rounds: of each the run without protection and the one with it.
        first: in bf16, which the others are compared with; None: this is it.
    """
    found = variants_of(rounds)
    plain, sparse = found[PLAIN], found[SPARSE]
    assert sparse.exposed_ms is not None
    mib, loss = sum(rounds[-1][1].slot_bytes) / _MIB, rounds[-1][0].loss
    reference = loss if first is None else first.loss
    return Format(
        name=name,
        bytes_full=bytes_full,
        iteration_ms=plain.iteration_ms,
        ratio=sparse.ratio,
        cpu_ratio=sparse.cpu_ratio,
        exposed_ms=sparse.exposed_ms,
        window_mib=mib,
        window_over_bf16=mib / (mib if first is None else first.window_mib),
        loss=loss,
        loss_over_bf16=None if loss is None or reference is None else loss - reference,
        identical=identical(rounds),
    )


def print_formats(report: FormatsReport, console: Console) -> None:
    """A table."""
    what = 'stand-ins for Transformer Engine' if report.stand_ins else 'Transformer Engine'
    table = Table(title=f'W = {report.window} on {what}, {report.hardware.line()}')
    for heading in (
        'configuration', 'iteration (ms)', 'protected over that', 'CPU time', 'exposed (ms)',
        'bytes a parameter', 'window (MiB)', 'over bf16', 'loss', 'over bf16',
    ):  # fmt: skip
        table.add_column(heading, justify='left' if heading == 'configuration' else 'right')
    for one in report.formats:
        table.add_row(
            one.name,
            one.iteration_ms.text(0),
            one.ratio.text(),
            one.cpu_ratio.text(),
            one.exposed_ms.text(1),
            str(one.bytes_full),
            f'{one.window_mib:.1f}',
            f'{one.window_over_bf16:.2f}',
            _shown(one.loss),
            _shown(one.loss_over_bf16, '+'),
        )
    console.print(table)
    different = [one.name for one in report.formats if not one.identical]
    verdict = f'[bold red]DIFFERENT in {", ".join(different)}[/]' if different else 'equal'
    console.print(
        f'Final states of all runs of a configuration: {verdict}. Losses: mean of the last tenth '
        f'of {report.iterations} iterations; a difference no larger than that of another seed may '
        'be chance.',
        highlight=False,
        soft_wrap=True,
    )


def _shown(loss: float | None, sign: str = '') -> str:
    return 'NaN' if loss is None else f'{loss:{sign}.3f}'
