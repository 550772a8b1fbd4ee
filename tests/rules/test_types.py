# SPDX-License-Identifier: Apache-2.0
"""Rules about what the adapter passes around: named types, and no arguments of upstream."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ADAPTER = ROOT / 'megatron' / 'moevement'
MOST_ANY = 10
"""Per thousand lines; what is only passed on is an `object`."""
READS_ARGUMENTS = {'arguments.py', 'checking.py', 'facts.py', 'pretrain_gpt.py', 'program.py'}
"""Make facts, settings and counters of upstream's arguments; besides these only `seams` has them,
where upstream hands them over or gives them away; and `offline`, a program that never trains."""


def files() -> list[Path]:
    return sorted(ADAPTER.rglob('*.py'))


def test_few_types_are_left_open() -> None:
    text = ''.join(path.read_text('utf-8') for path in files())
    assert len(re.findall(r'\bAny\b', text)) * 1000 <= MOST_ANY * text.count('\n')


def takes_arguments(tree: ast.Module) -> Iterator[str]:
    """Functions with a parameter that is upstream's arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for one in given:
                kind = '' if one.annotation is None else ast.unparse(one.annotation)
                if one.arg == 'args' or kind.endswith(('UpstreamArguments', 'Namespace')):
                    yield node.name


def test_arguments_of_upstream_end_at_the_program() -> None:
    taking = {
        str(path.relative_to(ADAPTER))
        for path in files()
        if any(takes_arguments(ast.parse(path.read_text('utf-8'))))
    }
    elsewhere = {name for name in taking if not name.startswith(('seams/', 'offline/'))}
    assert elsewhere == READS_ARGUMENTS


@pytest.mark.parametrize(
    ('source', 'seen'),
    [
        ('def f(args: Any): ...', ['f']),
        ('class A:\n    def f(self, *, given: argparse.Namespace): ...', ['f']),
        ('def f(a, settings: UpstreamArguments): ...', ['f']),
        ('def f(*args: object, **kwargs: object): ...', []),
        ('def f(settings: Settings): ...', []),
    ],
)
def test_every_way_to_take_arguments_is_seen(source: str, seen: list[str]) -> None:
    assert list(takes_arguments(ast.parse(source))) == seen
