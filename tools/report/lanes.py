# SPDX-License-Identifier: Apache-2.0
"""Who did what when, as places in a drawing of some width."""

from collections.abc import Sequence
from typing import NamedTuple

from tools.lab.history import History, together
from tools.lab.plots import Doing, Span
from tools.lab.text import duration

_MOST_RANKS = 64  # beyond it a lane is a stage
_TICKS = 4


class Lanes(NamedTuple):
    """A stage of the pipeline, or all ranks where stages are not known."""

    title: str
    lanes: list[tuple[str, list[Span]]]
    """Names and what they did."""


class Piece(NamedTuple):
    """A span of a lane that is drawn."""

    style: str
    """Class in the template."""
    left: float
    width: float
    """Both in percent."""
    text: str


class Track(NamedTuple):
    """A lane that is drawn."""

    name: str
    pieces: list[Piece]


class Timeline(NamedTuple):
    """Lanes over a stretch of time."""

    groups: list[tuple[str, list[Track]]]
    ticks: list[tuple[float, str]]
    """Percent and what stands there."""


_STYLES = {
    Doing.TRAINING: 'training',
    Doing.WAITING: 'waiting',
    Doing.STARTING: 'starting',
    Doing.REPLAYING: 'replaying',
}


def of_run(history: History) -> list[Lanes]:
    """Lanes by stage: of its ranks, or of all of them as one if the job has many."""
    stages: dict[int | None, list[int]] = {}
    for rank in history.ranks:
        place = history.places.get(rank)
        stages.setdefault(place.stage if place else None, []).append(rank)
    many = len(history.ranks) > _MOST_RANKS
    found = []
    for stage, ranks in sorted(stages.items(), key=lambda item: -1 if item[0] is None else item[0]):
        title = 'ranks' if stage is None else f'stage {stage}'
        if many:
            spans = together([history.spans[rank] for rank in ranks])
            found.append(Lanes(title, [(f'{len(ranks)} ranks', spans)]))
        else:
            found.append(Lanes(title, [(f'rank {rank}', history.spans[rank]) for rank in ranks]))
    return found


def timeline(groups: Sequence[Lanes], start: float, end: float) -> Timeline:
    """What is seen of the lanes from `start` to `end`, in seconds since the epoch."""
    length = max(end - start, 1e-3)

    def track(name: str, spans: Sequence[Span]) -> Track:
        seen = ((s, max(s.start, start), min(s.end, end)) for s in spans)
        return Track(name, [
            Piece(_STYLES[span.doing], 100 * (left - start) / length,
                  100 * (right - left) / length,
                  f'{span.doing}: {duration(span.end - span.start)}')
            for span, left, right in seen
            if right > left
        ])  # fmt: skip

    drawn = [(group.title, [track(*lane) for lane in group.lanes]) for group in groups]
    ticks = [
        (100.0 * tick / _TICKS, duration(length * tick / _TICKS) if tick else '0')
        for tick in range(_TICKS + 1)
    ]
    return Timeline(drawn, ticks)


def marks(history: History) -> list[tuple[int, float]]:
    """Number and place in percent of each failure, over the whole run."""
    length = max(history.end - history.begun, 1e-3)
    return [
        (number, 100 * (episode.start - history.begun) / length)
        for number, episode in enumerate(history.episodes, 1)
    ]
