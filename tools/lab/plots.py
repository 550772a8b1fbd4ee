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
    time: float
    """Time in seconds since the epoch."""
    before: Iteration
    after: Iteration
    lanes: Mapping[str, Sequence[Span]] = {}
    """Activity of all stages in order, by title."""


_COLORS = {
    Doing.TRAINING: OWN,
    Doing.WAITING: '#b9d7e4',
    Doing.STARTING: '#c4cad3',
    Doing.REPLAYING: '#f0a202',
}


def plot(plain: RunLog, sparse: RunLog, dense_bytes: int, target: Path, failure: Failure) -> None:
    """Draw both runs into a PNG file: losses, captured bytes, stages around the failure.

    Args:
        plain: the fault-free run.
        sparse: the run that failed and recovered.
        dense_bytes: size of a dense checkpoint of the logging rank.
        target: file to write; its folder is created.
        failure: what the logging rank survived.
    """
    heights = (3, 2, 1.3)
    size = (9, 1.4 * sum(heights))
    with picture(target, nrows=len(heights), figsize=size, height_ratios=heights) as found:
        above, below, strip = found
        _draw_loss(above, plain, sparse, failure)
        _draw_bytes(below, sparse, dense_bytes)
        _draw_stages(strip, failure, _origin(sparse))


def _draw_loss(axes: Any, plain: RunLog, sparse: RunLog, failure: Failure) -> None:
    axes.set_title('Loss over wall-clock time')
    thick = {'linewidth': 5, 'alpha': 0.45, 'label': 'fault-free run'}
    _draw_line(axes, plain.iterations, _origin(plain), color=OTHER, **thick)
    # A survivor's log has no gap of its own at a failure.
    outage = sparse.iterations.index(failure.after)
    pieces = sparse.iterations[:outage], sparse.iterations[outage:]
    for piece, label in zip(pieces, ('killed and recovered run', None), strict=True):
        thin = {'linewidth': 1.8, 'marker': '.', 'label': label}
        _draw_line(axes, piece, _origin(sparse), color=OWN, **thin)
    for place, (log, color) in enumerate(((plain, MUTED), (sparse, OWN))):
        _mark_end(axes, log, color, place)
    _mark_failure(axes, failure, _origin(sparse))
    axes.set_xlabel('seconds since the first iteration')
    axes.set_ylabel('language model loss')
    axes.margins(x=0.04)
    axes.legend(loc='upper right')


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


def _draw_line(axes: Any, piece: Sequence[Iteration], origin: float, **line: Any) -> None:
    times = [iteration.time - origin for iteration in piece]
    losses = [iteration.loss for iteration in piece]
    axes.plot(times, losses, solid_capstyle='round', **line)


def _mark_end(axes: Any, log: RunLog, color: str, place: int) -> None:
    """Label the end of a run beside the axes, apart from lines and failures."""
    last = log.iterations[-1]
    axes.annotate(
        f'iteration {last.number}\nloss {last.loss:.6f}',
        (1.02, 0.2 * place),
        xycoords='axes fraction',
        color=color,
        va='bottom',
    )


def _origin(log: RunLog) -> float:
    first = log.iterations[0]
    return first.time - first.elapsed_ms / 1000


def _draw_bytes(axes: Any, sparse: RunLog, dense_bytes: int) -> None:
    axes.set_title('Bytes captured per iteration, last rank')
    slots = {slot.iteration: slot.nbytes for slot in sparse.captured}
    sizes = [nbytes / MIB for nbytes in slots.values()]
    axes.bar(list(slots), sizes, color=OWN, width=0.75, label='sparse slot')
    dense = dense_bytes / MIB
    axes.axhline(dense, color=MUTED, linestyle='--', linewidth=1.4)
    share = sum(sizes) / max(len(sizes), 1) / dense
    axes.annotate(
        f'dense checkpoint: {dense:.2f} MiB      slots: {share:.0%} of it on average',
        (0.01, dense),
        xycoords=('axes fraction', 'data'),
        xytext=(0, 6),
        textcoords='offset points',
        color=MUTED,
        bbox={'facecolor': 'white', 'edgecolor': 'none', 'pad': 1},
    )
    axes.set_ylim(top=1.18 * dense)
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
