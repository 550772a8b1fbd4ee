# SPDX-License-Identifier: Apache-2.0
"""What the page draws, as positions in a drawing of some width: activity, pace, slots, memory."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ..lab.activity import Span, together
from ..lab.history import History, Progress
from ..lab.tables import duration, size, tick

_MOST_RANKS = 64  # with more ranks, a lane is a stage
_TICKS = 4
_BINS = 120


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
    ticks: list[tuple[float, str]]
    """Position in percent, and label."""


type Lanes = dict[str, dict[str, list[Span]]]
"""Activity by stage, or of all ranks if stages are unknown, and by lane."""


def of_run(history: History) -> Lanes:
    """One lane per rank, or one for the whole stage in a large job."""
    found: Lanes = {}
    for stage, ranks in history.by_stage(history.ranks):
        lanes = {f'rank {rank}': history.spans[rank] for rank in ranks}
        if len(history.ranks) > _MOST_RANKS:
            lanes = {f'{len(ranks)} ranks': together(list(lanes.values()))}
        found['ranks' if stage is None else f'stage {stage}'] = lanes
    return found


def timeline(groups: Lanes, start: float, end: float) -> Timeline:
    """Visible part of the lanes from `start` to `end`, in seconds since the epoch."""
    length = max(end - start, 1e-3)

    def pieces(spans: Sequence[Span]) -> list[Piece]:
        found = []
        for span in spans:
            left, right = max(span.start, start) - start, min(span.end, end) - start
            if right > left:
                about = f'{span.doing}: {duration(span.end - span.start)}'
                place = 100 * left / length, 100 * (right - left) / length
                found.append(Piece(span.doing.split()[0], *place, about))
        return found

    drawn = {
        title: {name: pieces(spans) for name, spans in lanes.items()}
        for title, lanes in groups.items()
    }
    ticks = [
        (100.0 * tick / _TICKS, duration(length * tick / _TICKS) if tick else '0')
        for tick in range(_TICKS + 1)
    ]
    return Timeline(drawn, ticks)


class Chart(NamedTuple):
    """A line over the time of the run, in a box of 100 by 100 with its origin at the top left."""

    points: str
    """An SVG path, with a piece for each period without a failure."""
    ticks: list[tuple[float, str]]
    """Percent from the bottom, and label."""


def pace_chart(history: History) -> Chart | None:
    """Seconds per undisturbed iteration, mean over ranks; failures leave gaps."""
    length = max(history.end - history.begun, 1e-3)
    bins: dict[int, list[Progress]] = defaultdict(list)
    for pieces in history.progress.values():
        for piece in pieces:
            share = (piece.time - history.begun) / length
            bins[min(int(share * _BINS), _BINS - 1)].append(piece)
    if len(bins) < 2:
        return None
    means = {
        place: sum(p.training_s for p in found) / sum(p.iterations for p in found)
        for place, found in bins.items()
    }
    highest = 1.1 * max(means.values())
    stretches: list[list[str]] = []
    before: float | None = None
    for place, seconds in sorted(means.items()):
        middle = (place + 0.5) / _BINS
        now = history.begun + length * middle
        # A failure that began or lasted since the last point interrupts the line.
        if before is None or any(
            one.start < now and (one.end is None or one.end > before) for one in history.episodes
        ):
            stretches.append([])
        stretches[-1].append(f'{100 * middle:.2f},{100 - 100 * seconds / highest:.2f}')
        before = now
    # A piece of a single point becomes a dot: a line of no length.
    path = ' '.join('M' + ' L'.join(one if one[1:] else one * 2) for one in stretches)
    step = _round_step(highest)
    ticks = [(100 * step * n / highest, tick(step * n)) for n in range(int(highest / step) + 1)]
    return Chart(path, ticks)


def _round_step(highest: float) -> float:
    """Distance of about three ticks: 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(highest / 3))
    return next(power * many for many in (1, 2, 5, 10) if power * many >= highest / 4)


def slot_bars(history: History) -> list[tuple[str, float, str]]:
    """The newest window and the whole state of the rank that captures most.

    Name, length in percent of the longest bar, and text of each bar.
    """
    if not history.slots:
        return []
    rank, slots = max(history.slots.items(), key=lambda item: max(item[1]))
    place = history.places.get(rank)
    dense = sum(full for full, _ in place.operators.values()) if place else 0
    longest = max(*slots, dense, 1)
    bars = [(f'slot {n}', 100 * slot / longest, size(slot)) for n, slot in enumerate(slots)]
    whole = [('whole state', 100 * dense / longest, size(dense))] if dense else []
    return [*bars, *whole]


def memory_rows(history: History) -> list[tuple[str, int, dict[str, int]]]:
    """Each node, the number of its ranks, and the bytes that they have reserved by kind."""
    kinds: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    ranks: dict[str, int] = defaultdict(int)
    for place in history.places.values():
        ranks[place.node] += 1
        for kind, nbytes in place.host_memory.items():
            kinds[place.node][kind] += nbytes
    return [(node, ranks[node], dict(kinds[node])) for node in sorted(kinds)]
