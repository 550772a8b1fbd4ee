# SPDX-License-Identifier: Apache-2.0
"""Activity of ranks over time, as positions in a drawing of some width."""

from collections.abc import Sequence
from typing import NamedTuple

from ..lab.activity import together
from ..lab.history import History
from ..lab.plots import Doing, Span
from ..lab.text import duration

_MOST_RANKS = 64  # with more ranks, a lane is a stage
_TICKS = 4


class Piece(NamedTuple):
    """A drawn span of a lane."""

    style: str
    """CSS class in the template."""
    left: float
    width: float
    """Position and width in percent."""
    text: str


class Timeline(NamedTuple):
    """Lanes over a period."""

    groups: dict[str, dict[str, list[Piece]]]
    """Pieces by stage and lane."""
    ticks: list[tuple[float, str]]
    """Position in percent, and label."""


type Lanes = dict[str, dict[str, list[Span]]]
"""Activity by stage, or of all ranks if stages are unknown, and by lane."""
_STYLES = {
    Doing.TRAINING: 'training',
    Doing.WAITING: 'waiting',
    Doing.STARTING: 'starting',
    Doing.REPLAYING: 'replaying',
}


def of_run(history: History) -> Lanes:
    """One lane per rank, or one for the whole stage in a large job."""
    many = len(history.ranks) > _MOST_RANKS
    found = {}
    for stage, ranks in history.by_stage(history.ranks):
        title = 'ranks' if stage is None else f'stage {stage}'
        if many:
            spans = together([history.spans[rank] for rank in ranks])
            found[title] = {f'{len(ranks)} ranks': spans}
        else:
            found[title] = {f'rank {rank}': history.spans[rank] for rank in ranks}
    return found


def timeline(groups: Lanes, start: float, end: float) -> Timeline:
    """Visible part of the lanes from `start` to `end`, in seconds since the epoch."""
    length = max(end - start, 1e-3)

    def pieces(spans: Sequence[Span]) -> list[Piece]:
        seen = ((s, max(s.start, start), min(s.end, end)) for s in spans)
        return [
            Piece(_STYLES[span.doing], 100 * (left - start) / length,
                  100 * (right - left) / length,
                  f'{span.doing}: {duration(span.end - span.start)}')
            for span, left, right in seen
            if right > left
        ]  # fmt: skip

    drawn = {
        title: {name: pieces(spans) for name, spans in lanes.items()}
        for title, lanes in groups.items()
    }
    ticks = [
        (100.0 * tick / _TICKS, duration(length * tick / _TICKS) if tick else '0')
        for tick in range(_TICKS + 1)
    ]
    return Timeline(drawn, ticks)


def marks(history: History) -> list[tuple[int, float]]:
    """Number and position in percent of each failure, over the whole run."""
    length = max(history.end - history.begun, 1e-3)
    return [
        (number, 100 * (episode.start - history.begun) / length)
        for number, episode in enumerate(history.episodes, 1)
    ]
