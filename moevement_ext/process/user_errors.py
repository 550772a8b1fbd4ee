# SPDX-License-Identifier: Apache-2.0
"""How a program ends that was started with a mistake."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moevement_ext.errors import EXIT_USER_ERROR, UserError


@contextmanager
def in_one_line() -> Iterator[None]:
    """Turn a `UserError` from within into its message on stderr, as argparse has it.

    Raises:
        SystemExit: with `EXIT_USER_ERROR`, in the place of a `UserError`.
    """
    try:
        yield
    except UserError as error:
        print(f'{Path(sys.argv[0]).name}: error: {error}', file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)
