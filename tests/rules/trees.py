# SPDX-License-Identifier: Apache-2.0
"""The files of the tree and their syntax, for the rules."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE, ADAPTER = 'moevement_ext', 'megatron/moevement'
PRODUCT = ('moevement_ext', 'megatron', 'tools', 'examples', 'scripts', 'pretrain_gpt.py')


def python_files(*names: str) -> list[Path]:
    places = [ROOT / name for name in names]
    return sorted(
        file for place in places for file in ([place] if place.is_file() else place.rglob('*.py'))
    )


@cache
def text(path: Path) -> str:
    return path.read_text('utf-8')


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


def sources(*names: str) -> dict[Path, ast.Module]:
    """Parsed Python files of folders and files, by path."""
    return {path: tree(path) for path in python_files(*names)}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(source: ast.AST) -> Iterator[str]:
    """Dotted names of all that a source imports; of `from a import b` both a and a.b."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ''
            yield from (f'{node.module}.{alias.name}' for alias in node.names)
        elif isinstance(node, ast.Call) and 'import' in ast.unparse(node.func):
            yield from (
                given.value
                for given in node.args
                if isinstance(given, ast.Constant) and isinstance(given.value, str)
            )
