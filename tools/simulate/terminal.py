# SPDX-License-Identifier: Apache-2.0
"""Flags, and errors of pictures."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


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


@contextmanager
def plot_errors(parser: argparse.ArgumentParser, target: Path) -> Iterator[None]:
    """Exit with a message if the image cannot be written, or its format is unknown."""
    try:
        yield
    except OSError as error:
        parser.error(f'--plot {target}: {error.strerror}')
    except ValueError as error:
        parser.error(f'--plot {target}: {error}')
