# SPDX-License-Identifier: Apache-2.0
"""The command around the check: what it looks for before anything is measured."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timed

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / 'scripts' / 'gpu_check.sh'
PROGRAMS = ('tests/gpu', 'tests/gpu/jobs', 'tests/conftest.py', 'pretrain_gpt.py')
"""What the check runs; names of modules that these start are in their texts."""


COMMAND = ROOT / 'moevement_ext' / 'command.py'
"""Names all programs, and starts none of them here."""


def looked_for() -> set[str]:
    names = re.findall(r'for name in \((.*?)\):', SCRIPT.read_text('utf-8'), re.S)[0]
    return set(re.findall(r"'([\w.]+)'", names))


def ours(module: str) -> Path | None:
    """The file of a module of this checkout."""
    path = ROOT.joinpath(*module.split('.'))
    files = (path.with_suffix('.py'), path / '__init__.py')
    return next((file for file in files if module and file.is_file()), None)


def imported(tree: ast.AST, file: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*file.relative_to(ROOT).parts[: -node.level]] if node.level else []
            module = '.'.join([*base, *filter(None, [node.module])])
            yield module
            yield from (f'{module}.{alias.name}' for alias in node.names)


def packages_in_use() -> set[str]:
    """Of others, imported when the modules that the check runs are."""
    files = [ROOT / program for program in PROGRAMS if program.endswith('.py')]
    files += [file for program in PROGRAMS for file in (ROOT / program).glob('*.py')]
    seen, found = {*files, COMMAND}, set()
    while files:
        file = files.pop()
        tree = ast.parse(file.read_text('utf-8'))
        at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        found |= {name for node in at_once for name in imported(node, file)}
        started = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        modules = {
            *imported(tree, file),
            *(text for text in started if re.fullmatch(r'[\w.]+', text)),
        }
        new = {path for name in modules if (path := ours(name)) and path not in seen}
        seen |= new
        files += new
    packages = {'.'.join(name.split('.')[: 1 + name.startswith('megatron.')]) for name in found}
    own = {name for name in packages if ROOT.joinpath(*name.split('.')).exists()}
    return packages - own - sys.stdlib_module_names


def test_everything_that_is_imported_is_looked_for() -> None:
    used = packages_in_use()
    assert {'torch', 'megatron.core', 'pytest', 'rich', 'xxhash'} <= used
    assert used <= looked_for()


def test_the_pages_name_every_package() -> None:
    page = ' '.join((ROOT / 'docs' / 'gpu.md').read_text('utf-8').split())
    (text,) = re.findall(r'\*\*Without a network\.\*\*(.*?) The check names', page)
    distributions = {name.split('.')[0] for name in looked_for()} - {'megatron', 'moevement_ext'}
    assert {name.replace('_', '-') for name in distributions} <= set(re.findall(r'[\w-]+', text))
