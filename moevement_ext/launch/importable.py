# SPDX-License-Identifier: Apache-2.0
"""Detects whether hot spares can import a program, or whether it would train on import."""

import ast
from pathlib import Path


def default_spares(program: str) -> int:
    """Default number of hot spares per node: 1 for a program with a main guard, else 0."""
    try:
        statements = ast.parse(Path(program).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return 0
    return int(any(_guards_main(one) for one in statements))


def _guards_main(statement: ast.stmt) -> bool:
    if not (isinstance(statement, ast.If) and isinstance(statement.test, ast.Compare)):
        return False
    sides = [statement.test.left, *statement.test.comparators]
    names = {one.id for one in sides if isinstance(one, ast.Name)}
    texts = {one.value for one in sides if isinstance(one, ast.Constant)}
    return names == {'__name__'} and texts == {'__main__'}
