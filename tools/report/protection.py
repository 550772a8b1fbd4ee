# SPDX-License-Identifier: Apache-2.0
"""Figures of protection: pace, slots, host memory, time until windows are safe."""

import math
import statistics
from collections import defaultdict
from typing import NamedTuple

from moevement_ext.events import Replanned

from ..lab.history import History, Progress
from ..lab.text import duration, size, tick

_BINS = 120


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
        if before is None or _failed_between(history, before, middle):
            stretches.append([])
        stretches[-1].append(f'{100 * middle:.2f},{100 - 100 * seconds / highest:.2f}')
        before = middle
    # A piece of a single point becomes a dot: a line of no length.
    path = ' '.join('M' + ' L'.join(one if one[1:] else one * 2) for one in stretches)
    step = _round_step(highest)
    ticks = [(100 * step * n / highest, tick(step * n)) for n in range(int(highest / step) + 1)]
    return Chart(path, ticks)


def _failed_between(history: History, before: float, after: float) -> bool:
    """True if a failure began or lasted between two positions of the run, from 0 to 1."""
    length = max(history.end - history.begun, 1e-3)
    start, end = (history.begun + length * place for place in (before, after))
    return any(
        episode.start < end and (episode.end is None or episode.end > start)
        for episode in history.episodes
    )


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


def figures(history: History) -> dict[str, str]:
    found: dict[str, str] = {}
    if history.window:
        found['iterations per window'] = str(history.window)
    if history.places:
        replicas = min(place.replicas for place in history.places.values())
        found['copies in other failure domains'] = str(replicas)
    if history.persisting_s:
        middle, worst = statistics.median(history.persisting_s), max(history.persisting_s)
        text = f'{duration(middle)} (median), {duration(worst)} at most'
        found['from the last slot until all have the window'] = text
    newest = history.newest_window
    if newest is not None:
        age = history.iteration - newest
        found['newest window that all have'] = f'begins at {newest}, {age} iterations ago'
    plans = {event.version for event in history.newest(Replanned).values()}
    if plans:
        found['times windows were replanned'] = str(max(plans))
    return found
