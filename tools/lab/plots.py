# SPDX-License-Identifier: Apache-2.0
"""The picture of a run that failed and recovered, and the fault-free run."""

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .drawing import FAILURE, MUTED, OTHER, OWN, note, picture
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
    thick = {'color': OTHER, 'linewidth': 5, 'alpha': 0.45, 'label': 'fault-free run'}
    _draw_line(axes, plain.iterations, _origin(plain), thick)
    # A survivor's log has no gap of its own at a failure.
    outage, origin = sparse.iterations.index(failure.after), _origin(sparse)
    thin = {'color': OWN, 'linewidth': 1.8, 'marker': '.'}
    named = {**thin, 'label': 'killed and recovered run'}
    _draw_line(axes, sparse.iterations[:outage], origin, named)
    _draw_line(axes, sparse.iterations[outage:], origin, thin)
    beside: Any = {'xycoords': 'axes fraction', 'va': 'bottom'}
    for place, (log, color) in enumerate(((plain, MUTED), (sparse, OWN))):
        last = log.iterations[-1]
        end = f'iteration {last.number}\nloss {last.loss:.6f}'
        note(axes, end, (1.02, 0.2 * place), (0, 0), color=color, **beside)
    _mark_failure(axes, failure, origin)
    axes.set_xlabel('seconds since the first iteration')
    axes.set_ylabel('language model loss')
    axes.margins(x=0.04)
    axes.legend(loc='upper right')


def _mark_failure(axes: Any, failure: Failure, origin: float) -> None:
    start, end = failure.time - origin, failure.after.time - origin
    axes.axvspan(start, end, color=FAILURE, alpha=0.08, linewidth=0)
    axes.axvline(start, color=FAILURE, linestyle='--', linewidth=1.2)
    lost = f'{failure.what}\nafter iteration {failure.before.number}'
    above: Any = {'xycoords': ('data', 'axes fraction'), 'va': 'top'}
    note(axes, lost, (start, 0.8), (6, 0), color=FAILURE, **above)
    back = f'back at iteration {failure.after.number}\nafter {end - start:.1f} s'
    at = end, failure.after.loss
    note(axes, back, at, (-8, 14), color=FAILURE, va='bottom', ha='right')


def _draw_line(
    axes: Any, piece: Sequence[Iteration], origin: float, line: Mapping[str, Any]
) -> None:
    times = [iteration.time - origin for iteration in piece]
    losses = [iteration.loss for iteration in piece]
    axes.plot(times, losses, solid_capstyle='round', **line)


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
    text = f'dense checkpoint: {dense:.2f} MiB      slots: {share:.0%} of it on average'
    above: Any = {'xycoords': ('axes fraction', 'data'), 'color': MUTED}
    above['bbox'] = {'facecolor': 'white', 'edgecolor': 'none', 'pad': 1}
    note(axes, text, (0.01, dense), (0, 6), **above)
    axes.set_ylim(top=1.18 * dense)
    axes.margins(x=0.01)
    axes.grid(axis='x', visible=False)
    axes.set_xlabel('iteration')
    axes.set_ylabel('MiB')


def _draw_stages(axes: Any, failure: Failure, origin: float) -> None:
    """Draw lanes around the failure, on the time axis of the loss."""
    axes.set_title('What each pipeline stage did around the failure')
    centred: Any = {'color': 'black', 'ha': 'center', 'va': 'center', 'fontsize': 8}
    for place, spans in enumerate(failure.lanes.values()):
        for doing, start, end in spans:
            axes.barh(place, end - start, left=start - origin, height=0.6, color=_COLORS[doing])
            if doing is not Doing.TRAINING:
                middle, text = (start + end) / 2 - origin, f'{end - start:.1f} s'
                axes.text(middle, place, text, clip_on=True, **centred)
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
