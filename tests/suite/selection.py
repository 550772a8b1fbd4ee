# SPDX-License-Identifier: Apache-2.0
"""Tests that an argument names."""

from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / 'tests'


class UnknownName(Exception):
    """An argument is no folder, file or option."""


def with_paths(arguments: Sequence[str]) -> list[str]:
    """Arguments for pytest: names of folders or files below `tests` are replaced by their paths."""
    found: list[str] = []
    named = False
    for before, argument in zip(['', *arguments], arguments, strict=False):
        if argument.startswith('-') or _takes_a_value(before):
            found.append(argument)
            continue
        named = True
        path = argument.partition('::')[0]
        found += [argument] if (ROOT / path).exists() else _named(argument)
    return found if named else [*found, 'tests']


def _takes_a_value(option: str) -> bool:
    """True for options whose value is a separate argument, as far as they are used here."""
    return option in ('-k', '-m', '-n', '-p', '-o', '-c', '-W', '--dist', '--maxfail', '--timeout')


def _named(argument: str) -> list[str]:
    """Paths of all folders `recover`, or of files `test_recover.py` if there is no such folder."""
    name, cases, case = argument.partition('::')
    name = name.removesuffix('.py').removeprefix('test_').strip('/')
    folders = [path for path in TESTS.rglob(name) if path.is_dir()]
    found = folders or list(TESTS.rglob(f'test_{name}.py'))
    if not found:
        raise UnknownName(f'{argument}: no folder or test file below tests has this name')
    return sorted(f'{path.relative_to(ROOT)}{cases}{case}' for path in found)
