# SPDX-License-Identifier: Apache-2.0
"""The picture of a run that failed and recovered, and the fault-free run."""

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .drawing import FAILURE, MUTED, OTHER, OWN, picture
from .run_log import Iteration, RunLog

MIB = 1 << 20


class Doing(enum.StrEnum):
    """Activity of a pipeline stage."""

    TRAINING = 'training'
    WAITING = 'waiting (state kept)'
    STARTING = 'starting process'
    REPLAYING = 'replaying'


class Span(NamedTuple):
    """A period, in seconds since the epoch."""

    doing: Doing
    start: float
    end: float


class Failure(NamedTuple):
    """A failure and the recovery from it."""

    what: str
    """Label of the lost part."""
    time: float
    """Time in seconds since the epoch."""
    before: Iteration
    """Last iteration in the log before the failure."""
    after: Iteration
    """First iteration in the log after the recovery."""
    lanes: Mapping[str, Sequence[Span]] = {}
    """Activity of all stages in order, by title, of a failure that the logging rank survived."""


def restarts(log: RunLog) -> list[Failure]:
    """Failures after which the logging rank restarted."""
    return [
        Failure('all workers killed', before[-1].time, before[-1], after[0])
        for before, after in zip(log.attempts, log.attempts[1:], strict=False)
    ]


_COLORS = {
    Doing.TRAINING: OWN,
    Doing.WAITING: '#b9d7e4',
    Doing.STARTING: '#c4cad3',
    Doing.REPLAYING: '#f0a202',
}


def plot(
    plain: RunLog,
    sparse: RunLog,
    dense_bytes: int | None,
    target: Path,
    survived: Failure | None = None,
) -> None:
    """Draw both runs into a PNG file.

    Args:
        plain: the fault-free run.
        sparse: the run that failed and recovered.
        dense_bytes: size of a dense checkpoint of the logging rank; None: no comparison.
        target: file to write; its folder is created.
        survived: a failure that the logging rank survived; adds a strip with the stages. None:
            restarts of that rank are marked.
    """
    heights = (3, 2) if survived is None else (3, 2, 1.3)
    size = (9, 1.4 * sum(heights))
    with picture(target, nrows=len(heights), figsize=size, height_ratios=heights) as found:
        above, below, *strip = found
        _draw_loss(above, plain, sparse, [survived] if survived else restarts(sparse))
        _draw_bytes(below, sparse, dense_bytes)
        if survived is not None:
            _draw_stages(strip[0], survived, _origin(sparse.attempts))


def _draw_loss(axes: Any, plain: RunLog, sparse: RunLog, failures: Sequence[Failure]) -> None:
    axes.set_title('Loss over wall-clock time')
    _draw_attempts(axes, plain.attempts, OTHER, 'fault-free run', linewidth=5, alpha=0.45)
    pieces = without_outages(sparse.attempts, failures)
    _draw_attempts(axes, pieces, OWN, 'killed and recovered run', linewidth=1.8, marker='.')
    for place, (log, color) in enumerate(((plain, MUTED), (sparse, OWN))):
        _mark_end(axes, log, color, place)
    for failure in failures:
        _mark_failure(axes, failure, _origin(sparse.attempts))
    axes.set_xlabel('seconds since the first iteration')
    axes.set_ylabel('language model loss')
    axes.margins(x=0.04)
    axes.legend(loc='upper right')


def without_outages(
    attempts: Sequence[Sequence[Iteration]], failures: Sequence[Failure]
) -> list[list[Iteration]]:
    """Periods of training; a survivor's log has no gap of its own at a failure."""
    backs = {failure.after for failure in failures}
    pieces: list[list[Iteration]] = []
    for attempt in attempts:
        pieces.append([])
        for iteration in attempt:
            if iteration in backs and pieces[-1]:
                pieces.append([])
            pieces[-1].append(iteration)
    return pieces


def _mark_failure(axes: Any, failure: Failure, origin: float) -> None:
    start, end = failure.time - origin, failure.after.time - origin
    axes.axvspan(start, end, color=FAILURE, alpha=0.08, linewidth=0)
    axes.axvline(start, color=FAILURE, linestyle='--', linewidth=1.2)
    axes.annotate(
        f'{failure.what}\nafter iteration {failure.before.number}',
        (start, 0.8),
        xycoords=('data', 'axes fraction'),
        xytext=(6, 0),
        textcoords='offset points',
        color=FAILURE,
        va='top',
    )
    axes.annotate(
        f'back at iteration {failure.after.number}\nafter {end - start:.1f} s',
        (end, failure.after.loss),
        xytext=(-8, 14),
        textcoords='offset points',
        color=FAILURE,
        va='bottom',
        ha='right',
    )


def _draw_attempts(
    axes: Any, attempts: Sequence[Sequence[Iteration]], color: str, label: str, **line: Any
) -> None:
    for number, attempt in enumerate(attempts):
        axes.plot(
            [iteration.time - _origin(attempts) for iteration in attempt],
            [iteration.loss for iteration in attempt],
            color=color,
            label=label if number == 0 else None,
            solid_capstyle='round',
            **line,
        )


def _mark_end(axes: Any, log: RunLog, color: str, place: int) -> None:
    """Label the end of a run beside the axes, apart from lines and failures."""
    last = log.attempts[-1][-1]
    axes.annotate(
        f'iteration {last.number}\nloss {last.loss:.6f}',
        (1.02, 0.2 * place),
        xycoords='axes fraction',
        color=color,
        va='bottom',
    )


def _origin(attempts: Sequence[Sequence[Iteration]]) -> float:
    """Time at which the first iteration began."""
    return attempts[0][0].time - attempts[0][0].elapsed_ms / 1000


def _draw_bytes(axes: Any, sparse: RunLog, dense_bytes: int | None) -> None:
    axes.set_title('Bytes captured per iteration, last rank')
    # An iteration that ran twice is drawn once.
    newest = {slot.iteration: slot.nbytes for slot in sparse.captured}
    axes.bar(
        list(newest),
        [nbytes / MIB for nbytes in newest.values()],
        color=OWN,
        width=0.75,
        label='sparse slot',
    )
    if dense_bytes is not None and newest:
        axes.axhline(dense_bytes / MIB, color=MUTED, linestyle='--', linewidth=1.4)
        mean = sum(newest.values()) / len(newest)
        axes.annotate(
            f'dense checkpoint: {dense_bytes / MIB:.2f} MiB      '
            f'slots: {mean / dense_bytes:.0%} of it on average',
            (0.01, dense_bytes / MIB),
            xycoords=('axes fraction', 'data'),
            xytext=(0, 6),
            textcoords='offset points',
            color=MUTED,
            bbox={'facecolor': 'white', 'edgecolor': 'none', 'pad': 1},
        )
        axes.set_ylim(top=1.18 * dense_bytes / MIB)
    axes.margins(x=0.01)
    axes.grid(axis='x', visible=False)
    axes.set_xlabel('iteration')
    axes.set_ylabel('MiB')


def _draw_stages(axes: Any, failure: Failure, origin: float) -> None:
    """Draw lanes around the failure, on the time axis of the loss."""
    axes.set_title('What each pipeline stage did around the failure')
    for place, spans in enumerate(failure.lanes.values()):
        for doing, start, end in spans:
            axes.barh(place, end - start, left=start - origin, height=0.6, color=_COLORS[doing])
            if doing is not Doing.TRAINING:
                axes.text(
                    (start + end) / 2 - origin,
                    place,
                    f'{end - start:.1f} s',
                    color='black',
                    ha='center',
                    va='center',
                    fontsize=8,
                    clip_on=True,
                )
    for doing, color in _COLORS.items():
        axes.barh(0, 0, color=color, label=doing)
    axes.axvline(failure.time - origin, color=FAILURE, linestyle='--', linewidth=1.2)
    margin = (failure.after.time - failure.time) / 4
    axes.set_xlim(failure.time - margin - origin, failure.after.time + margin - origin)
    axes.set_yticks(range(len(failure.lanes)), list(failure.lanes))
    axes.invert_yaxis()
    axes.grid(axis='y', visible=False)
    axes.set_xlabel('seconds since the first iteration')
    axes.legend(loc='upper center', bbox_to_anchor=(0.5, -0.42), ncols=len(_COLORS))
