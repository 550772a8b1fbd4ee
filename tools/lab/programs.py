# SPDX-License-Identifier: Apache-2.0
"""What the programs share: parsers with flags that are data, errors, and exit statuses."""

import signal
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from moevement_ext.config import ConfigurationError
from moevement_ext.system.leaving import Parser as Parser

from . import fields


class LabError(Exception):
    """A program cannot continue; `run_tool` prints why. Any function of a tool may raise it.

    Args:
        message: the problem and its remedy.
        tail: last lines of the log with the most detail, if any.
    """

    def __init__(self, message: str, tail: str = '') -> None:
        super().__init__(message)
        self.tail = tail


def flags_of(package: str | None) -> dict[str, dict[str, Any]]:
    """Contents of `flags.toml` in a package: flags by program, or by group of a program."""
    assert package
    return tomllib.loads(files(package).joinpath('flags.toml').read_text('utf-8'))


FLAGS = flags_of(__package__)


def split_at_end(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Arguments before and after the first `--`; of this process if None."""
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index('--') if '--' in given else len(given)
    return given[:end], given[end + 1 :]


def program(
    name: str,
    about: str | None,
    words: Mapping[str, object] = MappingProxyType({}),
    kinds: Mapping[str, Any] = MappingProxyType({}),
    **others: Any,
) -> Parser:
    """Parser of `moevement <name>` with its flags of `flags.toml`; `others` are of argparse."""
    parser = Parser(prog=f'moevement {name}', description=about, **others)
    add_flags(parser, FLAGS.get(name, {}), kinds, words)
    return parser


def add_flags(
    parser: Any,
    flags: Mapping[str, Mapping[str, Any]],
    kinds: Mapping[str, Any] = MappingProxyType({}),
    words: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Add flags that are data to a parser, or to a group of one.

    Of each: `either`, a word that flags share of which one may be given; `type`, `path`, a name of
    `kinds` or of a rule in `fields`; and arguments of `add_argument`.

    Args:
        parser: gets the flags.
        flags: by name, as a user gives it.
        kinds: further types by name.
        words: fields of the help texts.
    """
    either: dict[str, Any] = defaultdict(parser.add_mutually_exclusive_group)
    for name, given in flags.items():
        options = {**given, 'help': given.get('help', '').format(**words) or None}
        if kind := options.pop('type', None):
            known = {'path': Path, 'int': int, **kinds}
            options['type'] = known.get(kind) or fields.parser_of(getattr(fields, kind))
            options.setdefault('metavar', name.lstrip('-').upper().replace('-', '_'))
        group = options.pop('either', None)
        (either[group] if group else parser).add_argument(name, **options)


def run_tool(name: str, work: Callable[[Console], int]) -> int:
    """Return the exit status of `work`; 2 if it raises `LabError` or `ConfigurationError`.

    The error is printed after the name of the tool. Main thread only.
    """
    exit_on_sigterm()
    console, errors = Console(), Console(stderr=True)
    try:
        return work(console)
    except (ConfigurationError, LabError) as error:
        if tail := getattr(error, 'tail', ''):
            errors.print(tail, markup=False, highlight=False, soft_wrap=True)
        errors.print(f'{name}: {error}', style='bold red', markup=False, soft_wrap=True)
        return 2


def exit_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that jobs stop and memory is freed. Main thread only."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
