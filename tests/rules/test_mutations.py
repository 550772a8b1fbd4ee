# SPDX-License-Identifier: Apache-2.0
"""What a mutation or probe replaces is there: else it breaks nothing, and its test shows nothing.

Python lets any attribute be set, also one that the product has under another name since.
"""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDERS = [Path(__file__).parents[1] / 'distributed' / name for name in ('mutations', 'probes')]
FILES = [path for folder in FOLDERS for path in sorted(folder.glob('[!_]*.py'))]


def replaced(path: Path) -> Iterator[ast.Attribute]:
    """Attributes that functions of the file set."""
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute):
                    yield one


def is_there(module: ModuleType, target: ast.expr) -> bool:
    """Whether the module's names lead to it; True if they begin in a function."""
    if isinstance(target, ast.Attribute):
        if not is_there(module, target.value):
            return False
        owner = found(module, target.value)
        return owner is None or hasattr(owner, target.attr)
    return True


def found(module: ModuleType, expression: ast.expr) -> object:
    """The object; None if it is known in a function alone."""
    if isinstance(expression, ast.Attribute):
        owner = found(module, expression.value)
        return None if owner is None else getattr(owner, expression.attr)
    return getattr(module, expression.id, None) if isinstance(expression, ast.Name) else None


@pytest.mark.parametrize('path', FILES, ids=lambda path: f'{path.parent.name}/{path.stem}')
def test_replaced_names_exist(path: Path) -> None:
    module = importlib.import_module(f'tests.distributed.{path.parent.name}.{path.stem}')
    lost = [
        f'line {one.lineno}: {ast.unparse(one)}'
        for one in replaced(path)
        if not is_there(module, one)
    ]
    assert not lost


def test_a_name_that_the_product_has_no_more_is_found() -> None:
    module = ModuleType('mutations')
    module.path = Path  # type: ignore[attr-defined]
    sound, lost = (ast.parse(text, mode='eval').body for text in ('path.open', 'path.opened'))
    assert is_there(module, sound) and not is_there(module, lost)
