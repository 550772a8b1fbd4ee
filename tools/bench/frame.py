# SPDX-License-Identifier: Apache-2.0
"""The frame of the benchmarks: ways take turns over several rounds; figures of each over these.

A slow phase of the machine affects all ways; ratios are taken within a round.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console

from ..lab.figures import Spread
from ..lab.hardware import Hardware
from ..lab.tables import table


class Way(msgspec.Struct, frozen=True):
    """One way to do what is measured, over all rounds."""

    title: str
    figures: dict[str, Spread]


class Report(msgspec.Struct, frozen=True):
    """What a benchmark has found."""

    hardware: Hardware
    settings: dict[str, Any]
    ways: dict[str, Way]
    different: list[str]
    """What must be equal, and is not."""
    rounds: Any

    @property
    def exact(self) -> bool:
        return not self.different


def take_turns[R](
    rounds: int,
    titles: Mapping[str, str],
    run: Callable[[str, int], R],
    seconds: Callable[[R], float],
    console: Console,
) -> list[dict[str, R]]:
    """Run all ways in each round, by name; `run` takes the name and the number of the round."""
    found: list[dict[str, R]] = []
    for number in range(1, rounds + 1):
        found.append({})
        for name, title in titles.items():
            one = found[-1][name] = run(name, number)
            console.print(f'round {number}: {seconds(one):7.3f} s  {title}', highlight=False)
    return found


def over_rounds[R](
    rounds: Sequence[Mapping[str, R]],
    titles: Mapping[str, str],
    figures: Mapping[str, Callable[[R, R], float | None]],
) -> dict[str, Way]:
    """Figures of each way, computed from its measurement and from the first way's in a round.

    A figure of None does not count.
    """
    first = next(iter(rounds[0]))
    ways = {}
    for name in rounds[0]:
        found = {
            figure: [value for one in rounds if (value := of(one[name], one[first])) is not None]
            for figure, of in figures.items()
        }
        spreads = {figure: Spread.of(values) for figure, values in found.items() if values}
        ways[name] = Way(titles[name], spreads)
    return ways


def print_ways(
    ways: Iterable[Way], columns: Mapping[str, tuple[str, int]], console: Console
) -> None:
    """Print a row for each way. `columns`: heading and number of digits, by figure."""
    rows = (
        (way.title, *(_cell(way, figure, digits) for figure, (_, digits) in columns.items()))
        for way in ways
    )
    console.print(table(('', *(f'>{heading}' for heading, _ in columns.values())), rows))


def _cell(way: Way, figure: str, digits: int) -> str:
    return way.figures[figure].text(digits) if figure in way.figures else '-'
