# SPDX-License-Identifier: Apache-2.0
"""The report of a comparison: figures of all rows over all rounds, table and picture."""

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from ..lab import tables
from ..lab.drawing import FAILURE, MUTED, OWN, picture, subtitle
from ..lab.figures import Spread, medians
from ..lab.hardware import Hardware
from ..lab.tables import say, table
from . import measuring
from .measuring import PHASES, Curves
from .rows import Keeps, Row
from .running import RANKS, Course, Lived, PlannedFault

PICTURE = 'compare-goodput.png'
# Characters in a line of a document.
_WIDTH = 100
_BIN_S = 2.0
VALIDATION = 'validation losses'
"""Reported like a kind of state."""
COLUMNS = (
    'I or W', 'iteration', 'bytes/it', 'stall/it ms', 'recovery s', 'of it start', 'restore',
    'again', 'stage-it again', 'PLT', 'loss diff', 'bits', 'ETTR', 'warm',
)  # fmt: skip


class Conditions(msgspec.Struct, frozen=True):
    """Conditions of all rows."""

    hardware: Hardware
    loads: list[float]
    """Load of the last minute at the start of each round."""
    iterations: int
    iteration_s: list[float]
    """Seconds of an iteration of plain Megatron, by round."""
    copy_gb_per_s: float
    network_gb_per_s: float
    forked: bool
    """Processes start as forks of one that has imported the program."""
    warm_up: int
    """Iterations before the trace and the measurement begin."""
    faults: list[PlannedFault]


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row, in one round or over all rounds."""

    title: str
    exact: bool
    """True if the row promises equal bits."""
    lossy: bool
    throttled: bool
    period: str
    """The interval of its checkpoints, or the window."""
    ratio: Spread
    """Seconds of an undisturbed iteration over those of plain Megatron."""
    bytes: float
    """Bytes that a rank captures, or saves, in an iteration; mean."""
    stall_ms: Spread
    """Milliseconds in an iteration for which training waits for checkpoints; mean."""
    recovery_s: Spread
    """Median over the faults."""
    phases: dict[str, float]
    """Seconds; medians over the faults."""
    engine: dict[str, float]
    """Phases of the replay: seconds; medians over the faults."""
    again: float
    """Stage-iterations computed again, per fault."""
    lost_tokens: float | None
    """Share of all tokens whose updates of experts were lost (PLT); None: the row loses none."""
    loss_difference: float
    """Loss of the last iteration, minus that of plain Megatron."""
    different: list[str]
    """Kinds of state that differ from plain Megatron at the end."""
    ettr: Spread
    """Time of the kept iterations at the pace of plain Megatron, divided by the whole time."""
    ettr_warm: Spread
    """The same without the seconds until new processes ran the program."""
    unprotected: int
    """Faults before the first checkpoint was complete."""
    curves: Curves
    """Those of the last round."""

    @property
    def broken(self) -> bool:
        return self.exact and bool(self.different)


class Comparison(msgspec.Struct, frozen=True):
    """The whole report."""

    conditions: Conditions
    rows: dict[str, RowResult]
    not_run: dict[str, str]
    """Rows that failed here, and why."""

    @property
    def exact(self) -> bool:
        return not any(row.broken for row in self.rows.values())


def figures(row: Row, lived: Lived, plain: Lived, course: Course) -> RowResult:
    """Compute the figures of a job, relative to plain Megatron in the same round.

    Raises LabError: the job did not recover from a fault.
    """
    log, reference = lived.trained.log, plain.trained.log
    iteration_s = measuring.pace_s(reference)
    back = list(measuring.comebacks(lived))
    period = measuring.period(row.keeps, lived, course.interval)
    saved = lived.checkpoint_bytes / RANKS / course.interval
    captured = sum(slot.nbytes for slot in log.captured) / len(log.iterations)
    different = lived.trained.different(plain.trained)
    if log.validated != reference.validated:
        different.append(VALIDATION)
    started_s = sum(one.phases[PHASES[0]] for one in back)
    spreads = {
        'ratio': statistics.mean(measuring.undisturbed(log, lived.injected)) / iteration_s,
        'stall_ms': measuring.waited_ms(row.keeps, lived, course),
        'recovery_s': statistics.median(one.seconds for one in back),
        'ettr': measuring.ettr(log, iteration_s),
        'ettr_warm': measuring.ettr(log, iteration_s, started_s),
    }
    return RowResult(
        title=row.title,
        exact=row.exact,
        lossy=row.lossy,
        throttled=row.throttled,
        period=str(period) if row.keeps is not Keeps.NOTHING else '-',
        bytes=captured or saved,
        phases=medians([one.phases for one in back]),
        engine=medians([one.engine for one in back]),
        again=measuring.stage_iterations(lived),
        lost_tokens=measuring.lost_tokens(lived) if row.lossy else None,
        loss_difference=log.iterations[-1].loss - reference.iterations[-1].loss,
        different=different,
        unprotected=measuring.unprotected(row.keeps, lived, course.interval),
        curves=measuring.curves(lived),
        **{name: Spread.of([value]) for name, value in spreads.items()},
    )


def over_rounds(runs: Sequence[RowResult]) -> RowResult:
    """A row over its rounds, each with one value of each figure."""
    lost = [run.lost_tokens for run in runs if run.lost_tokens is not None]
    spreads = {
        name: Spread.of([getattr(run, name).median for run in runs])
        for name in ('ratio', 'stall_ms', 'recovery_s', 'ettr', 'ettr_warm')
    }
    return msgspec.structs.replace(
        runs[-1],
        bytes=statistics.median(run.bytes for run in runs),
        phases=medians([run.phases for run in runs]),
        engine=medians([run.engine for run in runs]),
        again=statistics.mean(run.again for run in runs),
        lost_tokens=statistics.mean(lost) if lost else None,
        loss_difference=statistics.median(run.loss_difference for run in runs),
        different=sorted({kind for run in runs for kind in run.different}),
        unprotected=sum(run.unprotected for run in runs),
        **spreads,
    )


def cells(row: RowResult) -> list[str]:
    phases = (row.phases.get(name, 0.0) for name in PHASES[:3])
    differs = row.different and ('differs' if row.exact or row.lossy else row.different[0])
    return [
        row.period,
        row.ratio.text(),
        f'{row.bytes / 1e6:.2f} MB' if row.bytes else '-',
        f'{row.stall_ms.median:.0f}',
        row.recovery_s.text(1),
        *(f'{seconds:.1f}' for seconds in phases),
        f'{row.again:.1f}',
        '-' if row.lost_tokens is None else f'{row.lost_tokens:.1%}',
        f'{row.loss_difference:+.4f}' if row.loss_difference else '0',
        differs or 'equal',
        row.ettr.text(),
        row.ettr_warm.text(),
    ]


def caption(conditions: Conditions) -> list[str]:
    faults = ', '.join(
        f'{fault.kind} of rank {fault.rank} at {fault.at_s:.1f} s' for fault in conditions.faults
    )
    pace = ', '.join(f'{seconds:.2f}' for seconds in conditions.iteration_s)
    loads = ', '.join(f'{load:.1f}' for load in conditions.loads)
    how = (
        'Workers are forks of a process that has imported the program, as warm as hot spares.'
        if conditions.forked
        else 'Workers are new processes, unless a row has a hot spare.'
    )
    return [
        f'{conditions.hardware.line()}.',
        f'{RANKS} ranks on {RANKS} emulated nodes, {conditions.iterations} iterations, of '
        f'{pace} s in plain Megatron; load {loads} at the start of each round.',
        f'Measured from iteration {conditions.warm_up} on; seconds after it: {faults}.',
        f'Copies to host memory are limited to {1000 * conditions.copy_gb_per_s:.4g} MB/s, sends '
        f'of windows to {1000 * conditions.network_gb_per_s:.4g} MB/s a rank, but not in rows '
        'with *.',
        how,
    ]


def notes(report: Comparison) -> list[str]:
    found = [f'{name} did not run: {why}' for name, why in report.not_run.items()]
    measured = report.conditions.iterations - report.conditions.warm_up
    for row in report.rows.values():
        if row.period.isdecimal() and int(row.period) > measured:
            found.append(
                f'{row.title}: its interval exceeds the {measured} measured iterations, which '
                'have little of the cost of its checkpoints; take more --iterations.'
            )
        if row.unprotected:
            found.append(
                f'{row.title}: {row.unprotected} faults before its first checkpoint was complete.'
            )
        if row.broken:
            found.append(f'{row.title}: the final state differs in {", ".join(row.different)}.')
    return found


def print_report(report: Comparison, console: Console) -> None:
    for line in caption(report.conditions):
        say(console, line)
    columns = ['', *(f'>{column}' for column in COLUMNS)]
    rows = [(marked(row), *cells(row)) for row in report.rows.values()]
    # At the width of a terminal, rich would cut the columns.
    wide = Console(file=console.file, width=max(console.width, 220))
    wide.print(table(columns, rows), soft_wrap=True)
    for line in notes(report):
        say(console, line)


def marked(row: RowResult) -> str:
    """Title of a row, marked if the limits do not apply to it."""
    return row.title if row.throttled else f'{row.title} *'


def markdown(report: Comparison) -> str:
    rows = ((marked(row).replace('*', '\\*'), *cells(row)) for row in report.rows.values())
    text = ' '.join(caption(report.conditions)).replace('*', '\\*')
    parts = [textwrap.fill(text, _WIDTH, break_on_hyphens=False)]
    parts += [tables.markdown(('', *COLUMNS), rows).rstrip()]
    parts += [textwrap.fill(' '.join(notes(report)), _WIDTH)] if notes(report) else []
    return '\n\n'.join(parts) + '\n'


def goodput(curves: Curves, iteration_s: float, width_s: float) -> np.ndarray:
    """Share of each span of `width_s` seconds in iterations that were kept, [spans].

    An iteration counts from the end of the previous one, for at most `iteration_s`; iterations that
    the job trained again later do not count.
    """
    ends = np.array([seconds for seconds, _ in curves.kept])
    begins = np.maximum(ends - iteration_s, np.concatenate([[ends[0]], ends[:-1]]))
    edges = np.arange(0, ends[-1] + width_s, width_s)
    spans = np.minimum(ends[:, None], edges[None, 1:]) - np.maximum(
        begins[:, None], edges[None, :-1]
    )
    useful: np.ndarray = np.clip(spans, 0, None).sum(axis=0) / width_s
    return useful


def draw(report: Comparison, target: Path) -> None:
    """Draw a strip for each row: how much of each moment was kept, and the faults.

    Raises OSError: the file cannot be written.
    """
    rows = list(report.rows.values())
    pace_s = report.conditions.iteration_s[-1]
    with picture(target, figsize=(9, 1.2 + 0.42 * len(rows))) as axes:
        axes.set_title('Goodput over the trace of failures')
        subtitle(axes, f'blue: share of each {_BIN_S:g} s in iterations that were kept; '
                 'red: a failure')  # fmt: skip
        for place, row in enumerate(rows):
            for number, share in enumerate(goodput(row.curves, pace_s, _BIN_S)):
                axes.barh(place, _BIN_S, left=number * _BIN_S, height=0.7, color=OWN,
                          alpha=float(min(max(share, 0.02), 1)), linewidth=0)  # fmt: skip
            for seconds, _ in row.curves.faults:
                axes.plot([seconds] * 2, [place - 0.42, place + 0.42], color=FAILURE, linewidth=2)
            axes.text(row.curves.kept[-1][0] + _BIN_S, place, f'{row.ettr.median:.2f}',
                      va='center', color=MUTED)  # fmt: skip
        axes.set_yticks(range(len(rows)), [marked(row) for row in rows])
        axes.invert_yaxis()
        axes.grid(axis='y', visible=False)
        axes.set_xlim(left=0)
        axes.set_xlabel('seconds since the warm-up; beside each strip: ETTR')
