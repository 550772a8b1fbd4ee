# SPDX-License-Identifier: Apache-2.0
"""Tells a program that hot spares can import from one that would train on import."""

import ast
from pathlib import Path


def default_spares(program: str) -> int:
    """Hot spares of a node that trains, if no number is given: 1 for a program with a main guard.

    Args:
        program: path of the program.
    """
    try:
        statements = ast.parse(Path(program).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return 0
    return int(any(_guards_main(one) for one in statements))


def _guards_main(statement: ast.stmt) -> bool:
    """True for `if __name__ == '__main__':`."""
    if not (isinstance(statement, ast.If) and isinstance(statement.test, ast.Compare)):
        return False
    sides = [statement.test.left, *statement.test.comparators]
    names = {one.id for one in sides if isinstance(one, ast.Name)}
    texts = {one.value for one in sides if isinstance(one, ast.Constant)}
    return names == {'__name__'} and texts == {'__main__'}
