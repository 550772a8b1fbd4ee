# SPDX-License-Identifier: Apache-2.0
"""A name has one meaning in engine and adapter, of a class as of a file.

Each list of exceptions is exact: what has been repaired must be taken off it.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ('moevement_ext', 'megatron/moevement')

CLASSES_STILL_DOUBLED: dict[str, str] = {}
"""And the folders that have them."""

FILES_STILL_DOUBLED: dict[str, str] = {}
"""As `CLASSES_STILL_DOUBLED`."""

MEANT_TO_BE_ALIKE = {'__init__.py', '__main__.py', 'slurm.py', 'torchrun.py'}
"""The last two stand for commands that were elsewhere."""


def files() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob('*.py'))


def classes(tree: ast.Module) -> Iterator[str]:
    """Those of a module, not those within functions."""
    return (node.name for node in tree.body if isinstance(node, ast.ClassDef))


def more_than_once(names: Iterator[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_a_class_has_a_name_of_its_own() -> None:
    trees = (ast.parse(path.read_text('utf-8')) for path in files())
    assert more_than_once(name for tree in trees for name in classes(tree)) == set(
        CLASSES_STILL_DOUBLED
    )


def test_a_file_has_a_name_of_its_own() -> None:
    names = (path.name for path in files() if path.name not in MEANT_TO_BE_ALIKE)
    assert more_than_once(names) == set(FILES_STILL_DOUBLED)


@pytest.mark.parametrize(
    ('source', 'seen'),
    [
        ('class A:\n    class B: ...\nclass _C: ...', ['A', '_C']),
        ('def f():\n    class A: ...', []),
    ],
)
def test_classes_of_a_module_are_seen(source: str, seen: list[str]) -> None:
    assert list(classes(ast.parse(source))) == seen
