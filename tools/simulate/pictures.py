# SPDX-License-Identifier: Apache-2.0
"""Pictures of simulation results."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.lab.drawing import FAILURE, OWN, PALETTE, picture, subtitle
from tools.lab.text import tick
from tools.simulate.monte_carlo import Timeline

_NAMES = {
    'none': 'no checkpoints',
    'dense': 'dense checkpoints',
    'checkfreq': 'CheckFreq',
    'gemini': 'Gemini',
    'moc': 'MoC-System',
    'moetion': 'MoEtion',
    'moevement': 'MoEvement, as printed',
    'ours': 'this implementation',
    'copy': 'this implementation, with data-parallel copies',
}
# Share of an axis that a label takes.
_CROWDED = 0.06


class Series(NamedTuple):
    """A line of a sweep: results of one system at each value."""

    values: Sequence[float]
    exact: Sequence[float]
    simulated: Sequence[tuple[float, float, float]] = ()
    """Mean, and both ends of the confidence interval; empty without a simulation."""


class Axis(NamedTuple):
    """The varied quantity."""

    label: str
    logarithmic: bool
    seconds: bool
    """Values are durations."""


def draw_sweep(series: Mapping[str, Series], axis: Axis, shown: str, target: Path) -> None:
    """Draw a line per system into an image file."""
    with picture(target, figsize=(8, 4.5)) as axes:
        varied = axis.label.removesuffix(' (s)') if axis.seconds else axis.label
        axes.set_title(f'{shown} by {varied}', loc='left')
        for (name, one), style in zip(series.items(), _styles(series), strict=True):
            axes.plot(one.values, one.exact, label=_NAMES[name], **style)
            if one.simulated:
                middle, low, high = np.array(one.simulated).T
                ends = [middle - low, high - middle]
                color = style['color']
                axes.errorbar(one.values, middle, ends, fmt='o', markersize=4, color=color)
        if any(one.simulated for one in series.values()):
            subtitle(axes, 'lines: closed form; points: simulated, with 95 % confidence')
        _ticks(axes, axis, sorted({value for one in series.values() for value in one.values}))
        axes.set_xlabel(varied)
        axes.set_ylabel(shown)
        axes.legend(loc='best')


def draw_timeline(timelines: Mapping[str, Timeline], bins: int, target: Path) -> None:
    """Draw the goodput of each system, and a mark per failure, into an image file."""
    with picture(target, figsize=(9, 4)) as axes:
        axes.set_title('Goodput over the time of the job', loc='left')
        first = next(iter(timelines.values()))
        span = tick(float(first.seconds[-1]) / bins)
        subtitle(axes, f'share of each {span} that went into iterations which were kept')
        least = 1.0
        for (name, one), style in zip(timelines.items(), _styles(timelines), strict=True):
            middles, goodput = one.goodput(bins)
            axes.step(middles, goodput, where='mid', label=_NAMES[name], **style)
            least = min(least, float(np.min(goodput)))
        axes.plot(
            first.failures, np.full(len(first.failures), 0.97), '|', color=FAILURE, markersize=9,
            label='failure', transform=axes.get_xaxis_transform(), clip_on=False,
        )  # fmt: skip
        length = max(float(one.seconds[-1]) for one in timelines.values())
        axes.set_xlim(0, length)
        times = _round_times(length)
        axes.set_xticks(times, [tick(time) for time in times])
        axes.set_ylim(max(least - (1 - least) / 10, 0), 1 + (1 - least) / 12)
        axes.set_xlabel('since the job began')
        axes.set_ylabel('goodput')
        axes.legend(loc='upper left', bbox_to_anchor=(0, -0.16), ncols=4)


def _styles(names: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Style of each system's line; the line of this project stands out."""
    others = iter(PALETTE * math.ceil(len(names) / len(PALETTE)))
    own: dict[str, dict[str, Any]] = {
        'ours': {'color': OWN, 'linewidth': 2.6, 'zorder': 3},
        'copy': {'color': OWN, 'linewidth': 1.6, 'linestyle': '--'},
    }
    return [own.get(name) or {'color': next(others), 'linewidth': 1.6} for name in names]


def _ticks(axes: Any, axis: Axis, values: Sequence[float]) -> None:
    """Label the values themselves, as far as space allows."""
    place = math.log if axis.logarithmic else float
    if axis.logarithmic:
        axes.set_xscale('log')
    length = place(values[-1]) - place(values[0])
    labelled: list[float] = []
    for value in values:
        if not labelled or place(value) - place(labelled[-1]) > _CROWDED * length:
            labelled.append(value)
    words = [tick(value) if axis.seconds else f'{value:,g}' for value in labelled]
    axes.set_xticks(labelled, words)
    axes.set_xticks([], minor=True)


def _round_times(length: float) -> list[float]:
    """About six times from 0 to `length`, at full minutes, hours or days if it is long."""
    steps = [unit * many for unit in (1, 60, 3600, 86400) for many in (1, 2, 5, 10, 20, 30)]
    step = next((step for step in steps if length / step <= 8), length / 6)
    return [step * number for number in range(int(length / step) + 1)]
