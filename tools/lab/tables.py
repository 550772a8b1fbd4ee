# SPDX-License-Identifier: Apache-2.0
"""Figures, lines and tables for people."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from moevement_ext.launch.launcher_events import duration as duration

from .figures import print_json

_UNITS = ('KiB', 'MiB', 'GiB', 'TiB')


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a line unchanged, without markup, added colors or line breaks."""
    console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    styles: Iterable[str | None] | None = None,
    **options: Any,
) -> Table:
    """A table for `Console.print`, with `options` of rich's Table and a style for each row.

    `>` before a heading right-aligns its cells, `!` keeps them on one line.
    """
    made = Table(**options)
    for name in columns:
        bare = name.lstrip('>!')
        marks = name[: len(name) - len(bare)]
        justify: Any = 'right' if '>' in marks else 'left'
        made.add_column(bare, justify=justify, no_wrap='!' in marks)
    listed = list(rows)
    for cells, style in zip(listed, styles or [None] * len(listed), strict=True):
        made.add_row(*cells, style=style)
    return made


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (head, ['---'] * len(head), *rows)
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def show(found: Mapping[str, object], *, as_json: bool) -> None:
    """Print the figures of an answer by name."""
    if as_json:
        print_json(found)
        return
    rows = [(name.replace('_', ' '), text(value)) for name, value in found.items()]
    Console().print(table(('', ''), rows, show_header=False))


def text(value: object) -> str:
    """A figure for people; of a list the ends of a range."""
    match value:
        case list():
            return ' to '.join(map(text, value))
        case dict():
            return ', '.join(f'{name} {text(one)}' for name, one in value.items()) or 'none'
        case float() if abs(value) >= 1000:
            return f'{value:,.0f}'
        case float():
            return f'{value:.1f}' if abs(value) >= 10 else f'{value:.4f}'
    return str(value)


def clock(time: float) -> str:
    """Format seconds since the epoch as local time, without the year."""
    return datetime.fromtimestamp(time).strftime('%m-%d %H:%M:%S')


def loss(value: float | None) -> str:
    """Format a loss as in the log; None: it is not finite."""
    return 'not finite' if value is None else f'{value:.4f}'


def tick(seconds: float) -> str:
    """Format a round duration for an axis: `5 min`, `1.5 h`."""
    if seconds < 1:
        return f'{1000 * seconds:.3g} ms' if seconds else '0'
    units = ((86400, 'd'), (3600, 'h'), (60, 'min'), (1, 's'))
    unit, name = next(one for one in units if seconds >= one[0])
    return f'{seconds / unit:.3g} {name}'


def size(nbytes: float) -> str:
    if nbytes < 1024:
        return f'{nbytes:.0f} bytes'
    power = min(int(math.log(nbytes, 1024)), len(_UNITS))
    value = nbytes / 1024**power
    return (
        f'{value:.0f} {_UNITS[power - 1]}' if value >= 100 else f'{value:.3g} {_UNITS[power - 1]}'
    )
