# SPDX-License-Identifier: Apache-2.0
"""Docstrings and comments are plain technical English, in the folders that are listed here."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ADAPTER: tuple[str, ...] = ('megatron/moevement', 'examples', 'pretrain_gpt.py')
ENGINE: tuple[str, ...] = ('moevement_ext',)
TOOLS: tuple[str, ...] = ('tools', 'scripts')

# A process is a rank, a worker, a launcher, a holder: each has a noun.
PERSONS = re.compile(r'\b(who|whoever|nobody|somebody|everybody)\b', re.IGNORECASE)


def sources() -> list[Path]:
    paths = [ROOT / name for name in (*ADAPTER, *ENGINE, *TOOLS)]
    assert all(path.exists() for path in paths)
    below = (
        file for path in paths for suffix in ('py', 's[hb]*') for file in path.rglob(f'*.{suffix}')
    )
    return sorted({*below, *(path for path in paths if path.is_file())})


def blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """The statements of the module, of each class and of each function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.body


def is_text(node: ast.stmt) -> bool:
    """True for a string literal that stands alone: a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def prose(source: str, is_python: bool) -> Iterator[tuple[int, str]]:
    """Lines of docstrings and comments, with their numbers."""
    if not is_python:
        lines = enumerate(source.splitlines(), 1)
        yield from ((number, line) for number, line in lines if line.lstrip().startswith('#'))
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for block in blocks(ast.parse(source)):
        for node in filter(is_text, block):
            text = ast.get_source_segment(source, node) or ''
            yield from enumerate(text.splitlines(), node.lineno)


def persons(source: str, is_python: bool = True) -> list[str]:
    return [
        f'{number}: {line.strip()}'
        for number, line in prose(source, is_python)
        if PERSONS.search(line)
    ]


def private_strings(source: str) -> list[str]:
    """String literals after an assignment to a private name: no tool checks or shows them."""
    return [
        f'{text.lineno}: {ast.unparse(target)}'
        for block in blocks(ast.parse(source))
        for constant, text in zip(block, block[1:], strict=False)
        if is_text(text) and isinstance(constant, ast.Assign | ast.AnnAssign | ast.TypeAlias)
        for target in (
            constant.targets
            if isinstance(constant, ast.Assign)
            else [constant.name if isinstance(constant, ast.TypeAlias) else constant.target]
        )
        if ast.unparse(target).startswith('_')
    ]


@pytest.mark.parametrize(
    ('source', 'offends'),
    [
        ('"""Whoever calls this."""', True),
        ('def f():\n    """One.\n\n    Nobody reads it.\n    """', True),
        ('x = 1  # who knows', True),
        ('class C:\n    x: int\n    """Somebody\'s."""', True),
        ("x = 'who'", False),
        ('# The whole of it.', False),
    ],
)
def test_persons_are_found(source: str, offends: bool) -> None:
    assert bool(persons(source)) is offends


@pytest.mark.parametrize(
    ('source', 'offends'),
    [
        ("_X = 1\n'''Text.'''", True),
        ("_X: int = 1\n'''Text.'''", True),
        ("type _X = int\n'''Text.'''", True),
        ("class C:\n    _x: int\n    '''Text.'''", True),
        ("X = 1\n'''Text.'''", False),
        ("_X = 1\n\n\ndef f():\n    '''Text.'''", False),
    ],
)
def test_strings_after_private_constants_are_found(source: str, offends: bool) -> None:
    assert bool(private_strings(source)) is offends


def test_processes_are_no_persons() -> None:
    offenders = [
        f'{path.relative_to(ROOT)}:{found}'
        for path in sources()
        for found in persons(path.read_text('utf-8'), path.suffix == '.py')
    ]
    assert not offenders


def test_private_constants_have_comments() -> None:
    """A comment in front of the constant; docstrings are for public names."""
    offenders = [
        f'{path.relative_to(ROOT)}:{found}'
        for path in sources()
        if path.suffix == '.py'
        for found in private_strings(path.read_text('utf-8'))
    ]
    assert not offenders
