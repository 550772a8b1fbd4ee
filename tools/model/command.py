# SPDX-License-Identifier: Apache-2.0
"""Flags that are data, and answers as a table or JSON: for `plan` and `simulate`."""

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from rich.console import Console

from ..lab.figures import print_json
from ..lab.tables import table


def read_flags(package: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Flags by group and name, from `flags.toml` of a package.

    Of each: `field`, the field that it gives, if that has another name; `either`, a word that
    flags share of which one may be given; `type`, a name; and arguments of `add_argument`.
    """
    return tomllib.loads(files(package).joinpath('flags.toml').read_text('utf-8'))


def add_groups(
    parser: argparse.ArgumentParser,
    groups: Mapping[str, Mapping[str, Mapping[str, Any]]],
    kinds: Mapping[str, Any],
    **words: object,
) -> None:
    """Add flags; `kinds` are the types by name, `words` the fields of the helps."""
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        exclusive: dict[str, Any] = {}
        for name, given in flags.items():
            options = {key: one for key, one in given.items() if key not in ('field', 'either')}
            options['help'] = given.get('help', '').format(**words) or None
            if 'type' in given:
                options['type'] = kinds[given['type']]
            target = group
            if 'either' in given:
                new = group.add_mutually_exclusive_group
                target = exclusive.get(given['either']) or exclusive.setdefault(
                    given['either'], new()
                )
            target.add_argument(f'--{name}', **options)


def flags_of_fields(groups: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, str]:
    """Flags whose name differs from the field's, by field."""
    return {
        given['field']: f'--{name}'
        for flags in groups.values()
        for name, given in flags.items()
        if 'field' in given
    }


def value_of(args: argparse.Namespace, field: str, flags: Mapping[str, str]) -> Any:
    """The value of the flag that gives a field; None without one."""
    name = flags.get(field, field).removeprefix('--').replace('-', '_')
    return getattr(args, name, None)


def show(found: Mapping[str, object], *, as_json: bool) -> None:
    """Print the figures of an answer by name."""
    if as_json:
        print_json(found)
        return
    rows = [(name.replace('_', ' '), text(value)) for name, value in found.items()]
    Console().print(table(('', ''), rows, show_header=False))


def records(rows: Sequence[Mapping[str, str]], title: str) -> None:
    """Print rows of equal names as a table."""
    columns = [f'>{name}' for name in rows[0]]
    Console().print(table(columns, [tuple(row.values()) for row in rows], title=title))


def text(value: object) -> str:
    """A figure for people; of a list the ends of a range."""
    match value:
        case list():
            return ' to '.join(map(text, value))
        case tuple():
            nested = any(isinstance(one, tuple) for one in value)
            return (', ' if nested else ' ').join(map(text, value))
        case dict():
            return ', '.join(f'{name} {text(one)}' for name, one in value.items()) or 'none'
        case float() if abs(value) >= 1000:
            return f'{value:,.0f}'
        case float():
            return f'{value:.1f}' if abs(value) >= 10 else f'{value:.4f}'
    return str(value)
