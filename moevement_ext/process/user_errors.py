# SPDX-License-Identifier: Apache-2.0
"""How a program ends that was started with a mistake."""

import argparse
import difflib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moevement_ext.command import called
from moevement_ext.errors import EXIT_USER_ERROR, UserError

_UNKNOWN = 'unrecognized arguments: '
# Share of letters that a flag must have in common with one that was meant.
_NEAR = 0.8


@contextmanager
def in_one_line() -> Iterator[None]:
    """Turn a `UserError` from within into its message on stderr, as argparse has it.

    Raises:
        SystemExit: with `EXIT_USER_ERROR`, in the place of a `UserError`.
    """
    try:
        yield
    except UserError as error:
        print(f'{called() or Path(sys.argv[0]).name}: error: {error}', file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)


def usage_error(parser: argparse.ArgumentParser, message: str) -> str:
    """What to print of a mistake in a command line, in the place of the usage of all flags.

    Args:
        parser: that has found it.
        message: of argparse; to a flag that is unknown, the nearest one that there is is added.
    """
    hint = ''
    if message.startswith(_UNKNOWN):
        known = [flag for action in parser._actions for flag in action.option_strings]
        given = message.removeprefix(_UNKNOWN).split()
        flags = [word.partition('=')[0] for word in given if word.startswith('--')]
        near = [near for flag in flags for near in difflib.get_close_matches(flag, known, 1, _NEAR)]
        hint = f'; did you mean {" ".join(near)}?' if near else ''
    return f'{parser.prog}: error: {message}{hint} ({parser.prog} --help: all flags)\n'
