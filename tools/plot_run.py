#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plots a run that failed and recovered beside the fault-free one.

    tools/plot_run.py --plain plain.log --sparse sparse.log --dense-bytes 1234567 --output run.png

Above: the loss of both runs over wall-clock time, every restart of the logging rank marked. Below:
the bytes that this rank (the last) captured in each iteration, and what a dense checkpoint in every
iteration would take. Everything comes from the logs of the trainer, run with `--log-interval 1`. (A
failure that the logging rank survives is not in its log; `scripts/demo.sh` draws that one from the
events, with a strip that shows what each pipeline stage did meanwhile.)
"""

import argparse
import enum
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

MIB = 1 << 20

_ITERATION = re.compile(
    r'\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+)\] iteration +(?P<iteration>\d+)/ *\d+ \|'
    r'.*elapsed time per iteration \(ms\): (?P<elapsed>[\d.]+) \|'
    r'.*lm loss: (?P<loss>[\d.E+-]+) \|'
)
_CAPTURED = re.compile(r' sparse ckpt \| window: (?P<window>\d+) \| slot bytes: (?P<bytes>\d+) \|')
_CONVERTED = ' sparse ckpt | converted window: '


class LogError(Exception):
    """A log that cannot be plotted; the message names it and says what to do."""


class Iteration(NamedTuple):
    """One trained iteration, as the trainer logged it."""

    time: float
    """Seconds since the epoch at which it was logged."""
    number: int
    elapsed_ms: float
    loss: float


class Captured(NamedTuple):
    """The bytes that the logging rank captured in one iteration."""

    iteration: int
    nbytes: int


@dataclass(frozen=True)
class RunLog:
    """What a log says; a job that was restarted has several lives."""

    lives: list[list[Iteration]]
    captured: list[Captured]

    @property
    def iterations(self) -> list[Iteration]:
        """All trained iterations in the order of the log."""
        return [iteration for life in self.lives for iteration in life]


class Failure(NamedTuple):
    """Something was killed and the job came back."""

    what: str
    """What was lost, as a label."""
    time: float
    """Seconds since the epoch."""
    before: Iteration
    """The last one logged before."""
    after: Iteration
    """The first one logged when the job was back."""


class Doing(enum.StrEnum):
    """What a pipeline stage does."""

    TRAINING = 'training'
    WAITING = 'waiting (state kept)'
    STARTING = 'starting process'
    REPLAYING = 'replaying'


class Span(NamedTuple):
    """A stretch of time, in seconds since the epoch."""

    doing: Doing
    start: float
    end: float


class Lane(NamedTuple):
    """What one pipeline stage did over time."""

    title: str
    spans: list[Span]


class LocalizedFailure(NamedTuple):
    """A failure that cost one pipeline stage its state while the others kept theirs."""

    failure: Failure
    lanes: list[Lane]
    """Of all stages, the first one first."""


def restarts(log: RunLog) -> list[Failure]:
    """The failures after which the logging rank began a new life."""
    return [
        Failure('all workers killed', before[-1].time, before[-1], after[0])
        for before, after in zip(log.lives, log.lives[1:], strict=False)
    ]


def parse_log(text: str) -> RunLog:
    """Read the lines of upstream's training log and those of sparse checkpointing.

    A new life of the job begins after a conversion, and where the iteration number falls back.
    """
    lives: list[list[Iteration]] = []
    captured: list[Captured] = []
    restarted = True
    for line in text.splitlines():
        if found := _ITERATION.search(line):
            iteration = Iteration(
                datetime.fromisoformat(found['time']).timestamp(),
                int(found['iteration']),
                float(found['elapsed']),
                float(found['loss']),
            )
            if restarted or iteration.number <= lives[-1][-1].number:
                lives.append([])
            lives[-1].append(iteration)
            restarted = False
        elif lives and (found := _CAPTURED.search(line)):
            captured.append(Captured(lives[-1][-1].number, int(found['bytes'])))
        elif _CONVERTED in line:
            restarted = True
    return RunLog(lives, captured)


def read_log(path: Path) -> RunLog:
    """Read a log file.

    Raises:
        LogError: it cannot be read or holds no trained iteration.
    """
    try:
        log = parse_log(path.read_text('utf-8', errors='replace'))
    except OSError as error:
        raise LogError(f'{path}: {error.strerror}; give the log of a training run') from error
    if not log.lives:
        raise LogError(f'{path}: no trained iteration; run the trainer with --log-interval 1')
    return log


# ---- drawing

_PLAIN, _SPARSE, _FAILURE, _MUTED = '#7a869a', '#0b6e99', '#c8102e', '#5e6c84'
_COLORS = {
    Doing.TRAINING: '#0b6e99',
    Doing.WAITING: '#b9d7e4',
    Doing.STARTING: '#c4cad3',
    Doing.REPLAYING: '#f0a202',
}


def plot(
    plain: RunLog,
    sparse: RunLog,
    dense_bytes: int | None,
    target: Path,
    localized: LocalizedFailure | None = None,
) -> None:
    """Draw both runs into a PNG file.

    Args:
        plain: the fault-free run.
        sparse: the run that failed and recovered.
        dense_bytes: of the logging rank; None draws no comparison.
        target: file to write; its folder is made.
        localized: a failure that the logging rank survived; adds the strip of the stages. None
            marks the restarts of that rank.
    """
    # Here, for it takes a second: readers of logs and wrong flags should not wait for it.
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    style: Any = {
        'font.size': 10, 'axes.spines.top': False, 'axes.spines.right': False,
        'axes.grid': True, 'grid.color': '#e6e8eb', 'axes.axisbelow': True,
        'axes.edgecolor': _MUTED, 'xtick.color': _MUTED, 'ytick.color': _MUTED,
        'axes.titlelocation': 'left', 'axes.titleweight': 'bold', 'legend.frameon': False,
    }  # fmt: skip
    with pyplot.rc_context(style):
        heights = (3, 2) if localized is None else (3, 2, 1.3)
        figure, (above, below, *strip) = pyplot.subplots(
            len(heights), 1, figsize=(9, 1.4 * sum(heights)), height_ratios=heights,
            layout='constrained',
        )  # fmt: skip
        _draw_loss(above, plain, sparse, [localized.failure] if localized else restarts(sparse))
        _draw_bytes(below, sparse, dense_bytes)
        if localized is not None:
            _draw_stages(strip[0], localized, _origin(sparse.lives))
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150)
        pyplot.close(figure)


def _draw_loss(axes: Any, plain: RunLog, sparse: RunLog, failures: Sequence[Failure]) -> None:
    axes.set_title('Loss over wall-clock time')
    _draw_lives(axes, plain.lives, _PLAIN, 'fault-free run', linewidth=5, alpha=0.45)
    _draw_lives(axes, sparse.lives, _SPARSE, 'killed and recovered run', linewidth=1.8, marker='.')
    _mark_end(axes, plain.lives, _MUTED)
    _mark_end(axes, sparse.lives, _SPARSE)
    for failure in failures:
        _mark_failure(axes, failure, _origin(sparse.lives))
    axes.set_xlabel('seconds since the first iteration')
    axes.set_ylabel('language model loss')
    axes.margins(x=0.04)
    axes.legend(loc='upper right')


def _mark_failure(axes: Any, failure: Failure, origin: float) -> None:
    start, end = failure.time - origin, failure.after.time - origin
    axes.axvspan(start, end, color=_FAILURE, alpha=0.08, linewidth=0)
    axes.axvline(start, color=_FAILURE, linestyle='--', linewidth=1.2)
    axes.annotate(
        f'{failure.what}\nafter iteration {failure.before.number}',
        (start, 0.8), xycoords=('data', 'axes fraction'), xytext=(6, 0),
        textcoords='offset points', color=_FAILURE, va='top',
    )  # fmt: skip
    axes.annotate(
        f'back at iteration {failure.after.number}\nafter {end - start:.1f} s',
        (end, failure.after.loss), xytext=(-8, 14), textcoords='offset points',
        color=_FAILURE, va='bottom', ha='right',
    )  # fmt: skip


def _draw_lives(
    axes: Any, lives: Sequence[Sequence[Iteration]], color: str, label: str, **line: Any
) -> None:
    for number, life in enumerate(lives):
        axes.plot(
            [iteration.time - _origin(lives) for iteration in life],
            [iteration.loss for iteration in life],
            color=color, label=label if number == 0 else None, solid_capstyle='round', **line,
        )  # fmt: skip


def _mark_end(axes: Any, lives: Sequence[Sequence[Iteration]], color: str) -> None:
    last = lives[-1][-1]
    axes.annotate(
        f'iteration {last.number}\nloss {last.loss:.6f}', (last.time - _origin(lives), last.loss),
        xytext=(0, 28), textcoords='offset points', color=color, ha='right', va='bottom',
    )  # fmt: skip


def _origin(lives: Sequence[Sequence[Iteration]]) -> float:
    """When the first iteration began."""
    return lives[0][0].time - lives[0][0].elapsed_ms / 1000


def _draw_bytes(axes: Any, sparse: RunLog, dense_bytes: int | None) -> None:
    axes.set_title('Bytes captured per iteration, last rank')
    newest = dict(sparse.captured)  # an iteration that ran again is drawn once
    axes.bar(
        list(newest), [nbytes / MIB for nbytes in newest.values()],
        color=_SPARSE, width=0.75, label='sparse slot',
    )  # fmt: skip
    if dense_bytes is not None and newest:
        axes.axhline(dense_bytes / MIB, color=_MUTED, linestyle='--', linewidth=1.4)
        mean = sum(newest.values()) / len(newest)
        axes.annotate(
            f'dense checkpoint: {dense_bytes / MIB:.2f} MiB      '
            f'slots: {mean / dense_bytes:.0%} of it on average',
            (0.01, dense_bytes / MIB), xycoords=('axes fraction', 'data'), xytext=(0, 6),
            textcoords='offset points', color=_MUTED,
            bbox={'facecolor': 'white', 'edgecolor': 'none', 'pad': 1},
        )  # fmt: skip
        axes.set_ylim(top=1.18 * dense_bytes / MIB)
    axes.margins(x=0.01)
    axes.grid(axis='x', visible=False)
    axes.set_xlabel('iteration')
    axes.set_ylabel('MiB')


def _draw_stages(axes: Any, localized: LocalizedFailure, origin: float) -> None:
    """Lanes around the failure, on the clock of the loss."""
    failure, lanes = localized
    axes.set_title('What each pipeline stage did around the failure')
    for place, lane in enumerate(lanes):
        for doing, start, end in lane.spans:
            axes.barh(place, end - start, left=start - origin, height=0.6, color=_COLORS[doing])
            if doing is not Doing.TRAINING:
                axes.text(
                    (start + end) / 2 - origin, place, f'{end - start:.1f} s', color='black',
                    ha='center', va='center', fontsize=8, clip_on=True,
                )  # fmt: skip
    for doing, color in _COLORS.items():
        axes.barh(0, 0, color=color, label=doing)
    axes.axvline(failure.time - origin, color=_FAILURE, linestyle='--', linewidth=1.2)
    margin = (failure.after.time - failure.time) / 4
    axes.set_xlim(failure.time - margin - origin, failure.after.time + margin - origin)
    axes.set_yticks(range(len(lanes)), [lane.title for lane in lanes])
    axes.invert_yaxis()
    axes.grid(axis='y', visible=False)
    axes.set_xlabel('seconds since the first iteration')
    axes.legend(loc='upper center', bbox_to_anchor=(0.5, -0.42), ncols=len(_COLORS))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog='plot_run', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--plain', type=Path, required=True, help='log of the fault-free run')
    parser.add_argument('--sparse', type=Path, required=True, help='log of the recovered run')
    parser.add_argument('--dense-bytes', type=int, help='dense checkpoint of the last rank')
    parser.add_argument('--output', type=Path, required=True, help='PNG file to write')
    args = parser.parse_args(argv)
    try:
        plot(read_log(args.plain), read_log(args.sparse), args.dense_bytes, args.output)
    except LogError as error:
        print(f'plot_run: {error}', file=sys.stderr)
        return 2
    print(args.output)
    return 0


if __name__ == '__main__':
    sys.exit(main())
