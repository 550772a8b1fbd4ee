# SPDX-License-Identifier: Apache-2.0
"""Flags that are data, and answers as a table or JSON: for `plan` and `simulate`."""

import argparse
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from ..lab.figures import print_json
from ..lab.tables import table
from . import fields


def add_flags_of(
    parser: argparse.ArgumentParser,
    package: str,
    kinds: Mapping[str, Any] = MappingProxyType({}),
    **words: object,
) -> None:
    """Add the flags of `flags.toml` in a package, by group and name.

    Of each: `either`, a word that flags share of which one may be given; `type`, a name of `kinds`
    or of a rule in `fields`; and arguments of `add_argument`.

    Args:
        parser: gets the flags.
        package: the package with the file.
        kinds: further types by name.
        words: fields of the help texts.
    """
    text = files(package).joinpath('flags.toml').read_text('utf-8')
    for title, flags in tomllib.loads(text).items():
        group = parser.add_argument_group(title)
        exclusive: dict[str, Any] = defaultdict(group.add_mutually_exclusive_group)
        for name, options in flags.items():
            options['help'] = options.get('help', '').format(**words) or None
            if kind := options.pop('type', None):
                known = {'path': Path, **kinds}
                options['type'] = known.get(kind) or fields.parser_of(getattr(fields, kind))
                options.setdefault('metavar', name.upper().replace('-', '_'))
            either = options.pop('either', None)
            (exclusive[either] if either else group).add_argument(f'--{name}', **options)


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
