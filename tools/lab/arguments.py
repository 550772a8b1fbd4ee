# SPDX-License-Identifier: Apache-2.0
"""Command line parser of the tools, and types of arguments."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from moevement_ext.errors import EXIT_USER_ERROR
from moevement_ext.system.leaving import usage_error


class Parser(argparse.ArgumentParser):
    """Prints help without reformatting, and errors without the usage text."""

    def __init__(self, prog: str, **others: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, **{'formatter_class': formatter, **others})

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, usage_error(self, message))


def split_at_end(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Arguments before and after the first `--`; of this process if None."""
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index('--') if '--' in given else len(given)
    return given[:end], given[end + 1 :]


def at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text) if text.isdecimal() else least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f'{text}: give a whole number, {least} or more')
        return value

    return whole_number


def above_0(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f'{text}: give a number above 0')
    return value


class Flag(NamedTuple):
    """Arguments of `add_argument`; None: argparse's default."""

    name: str
    help: str | None = None
    type: Callable[[str], object] | None = None
    default: object = None
    metavar: str | None = None
    choices: Iterable[str] | None = None


def add_flags(container: Any, *flags: Flag) -> None:
    """Add flags to a parser, or to a group of one."""
    for flag in flags:
        name, *values = flag
        given = zip(Flag._fields[1:], values, strict=True)
        container.add_argument(name, **{key: value for key, value in given if value is not None})
