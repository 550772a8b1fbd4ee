# SPDX-License-Identifier: Apache-2.0
"""Ends a program after a mistake of the user, with one line of explanation."""

import argparse
import difflib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moevement_ext.errors import EXIT_USER_ERROR, UserError

_UNKNOWN = 'unrecognized arguments: '
# Similarity, from 0 to 1, at which a known flag is suggested for an unknown one.
_NEAR = 0.8


@contextmanager
def in_one_line() -> Iterator[None]:
    """Turn a `UserError` in the context into one line on stderr, in the style of argparse.

    Raises `SystemExit` with `EXIT_USER_ERROR` instead.
    """
    try:
        yield
    except UserError as error:
        print(f'{_program()}: error: {error}', file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)


def _program() -> str:
    spec = getattr(sys.modules['__main__'], '__spec__', None)
    if spec is not None:  # started by -m
        return f'python -m {spec.name.removesuffix(".__main__")}'
    return Path(sys.argv[0]).name


def usage_error(parser: argparse.ArgumentParser, message: str) -> str:
    """Format an error of a command line in one line, instead of the usage of all flags.

    For an unknown flag, the most similar known flag is added.
    """
    hint = ''
    if message.startswith(_UNKNOWN):
        known = [flag for action in parser._actions for flag in action.option_strings]
        given = message.removeprefix(_UNKNOWN).split()
        flags = [word.partition('=')[0] for word in given if word.startswith('--')]
        near = [near for flag in flags for near in difflib.get_close_matches(flag, known, 1, _NEAR)]
        hint = f'; did you mean {" ".join(near)}?' if near else ''
    return f'{parser.prog}: error: {message}{hint} ({parser.prog} --help: all flags)\n'
