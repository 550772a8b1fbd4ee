# SPDX-License-Identifier: Apache-2.0
"""Tables and lines on a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from .figures import print_json


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
