# SPDX-License-Identifier: Apache-2.0
"""The three pictures of a comparison."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..lab.drawing import FAILURE, MUTED, OTHER, OWN, PALETTE, picture, subtitle
from .measuring import Curves
from .report import Comparison, RowResult, marked

GOODPUT, ETTR, LOSS = 'compare-goodput.png', 'compare-ettr.png', 'compare-loss.png'
_BIN_S = 2.0


def draw_all(report: Comparison, folder: Path) -> list[Path]:
    """Draw all pictures into a folder; returns their files.

    Raises OSError: a file cannot be written.
    """
    draw_goodput(report, folder / GOODPUT)
    draw_ettr(report, folder / ETTR)
    draw_loss(report, folder / LOSS)
    return [folder / name for name in (GOODPUT, ETTR, LOSS)]


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


def draw_goodput(report: Comparison, target: Path) -> None:
    """Draw a strip for each row: how much of each moment was kept, and the faults."""
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


def draw_ettr(report: Comparison, target: Path) -> None:
    """Draw measured ETTR as bars, and the prediction as marks."""
    rows = list(report.rows.values())
    with picture(target, figsize=(9, 1.2 + 0.42 * len(rows))) as axes:
        axes.set_title('ETTR, measured and predicted')
        subtitle(axes, 'bars: measured (lighter: without process starts); diamonds: predicted')
        places = np.arange(len(rows))
        axes.barh(places, [row.ettr_warm.median for row in rows], 0.6, color=OWN, alpha=0.3)
        axes.barh(places, [row.ettr.median for row in rows], 0.6, color=OWN)
        for place, row in zip(places, rows, strict=True):
            axes.plot([row.ettr.min, row.ettr.max], [place] * 2, color='black', linewidth=1)
            if row.predicted is not None:
                axes.plot(row.predicted.median, place, 'D', color=FAILURE, markersize=6)
        axes.set_yticks(places, [marked(row) for row in rows])
        axes.invert_yaxis()
        axes.grid(axis='y', visible=False)
        axes.set_xlim(0, 1.05)
        axes.set_xlabel('effective training time ratio')


def draw_loss(report: Comparison, target: Path) -> None:
    """Draw the validation loss; rows that equal plain Megatron share one line."""
    same, others = split(report)
    size: dict[str, Any] = {'nrows': 2, 'figsize': (9, 6.5), 'height_ratios': (2, 1)}
    with picture(target, **(size if others else {'figsize': (9, 4)})) as found:
        above, *rest = found if others else (found,)
        above.set_title('Validation loss over the run')
        _line(above, report.plain.validated, color=OTHER, linewidth=6, alpha=0.45,
              label='without failures')  # fmt: skip
        if same:
            _line(above, same[0].curves.validated, color=OWN, linewidth=1.6, marker='.',
                  label=f'equal to it at each point: {len(same)} rows with failures')  # fmt: skip
        for row, color in zip(others, PALETTE[1:] * len(others), strict=False):
            style = {'color': color, 'linewidth': 1.6, 'marker': '.'}
            _line(above, row.curves.validated, label=row.title, **style)
            _line(rest[0], _apart(row, report), **style)
        _marks([above, *rest], others or same)
        above.set_ylabel('validation loss')
        above.legend(loc='upper right')
        for below in rest:
            below.set_title('... minus that without failures')
            below.axhline(0, color=OWN, linewidth=1.6)
            below.set_ylabel('difference')
            below.sharex(above)
        [above, *rest][-1].set_xlabel('iteration; dashes: where failures struck')


def _apart(row: RowResult, report: Comparison) -> dict[int, float]:
    """Validation losses minus those of plain Megatron."""
    plain = report.plain.validated
    both = row.curves.validated.keys() & plain.keys()
    return {number: row.curves.validated[number] - plain[number] for number in both}


def split(report: Comparison) -> tuple[list[RowResult], list[RowResult]]:
    """Rows whose validation losses all equal those of plain Megatron, and the others.

    A row with another layout is compared with plain Megatron in that layout, and is in neither.
    """
    rows = [row for row in report.rows.values() if row.title not in report.other_layout]
    same = [row for row in rows if row.curves.validated == report.plain.validated]
    return same, [row for row in rows if row.curves.validated != report.plain.validated]


def _line(axes: Any, losses: dict[int, float], **style: Any) -> None:
    numbers = sorted(losses)
    axes.plot(numbers, [losses[number] for number in numbers], **style)


def _marks(pictures: Sequence[Any], rows: Sequence[RowResult]) -> None:
    for axes in pictures:
        for number in {hit for row in rows for hit in row.curves.hit}:
            axes.axvline(number, color=FAILURE, linestyle='--', linewidth=0.8, alpha=0.6)
