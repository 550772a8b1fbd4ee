# SPDX-License-Identifier: Apache-2.0
"""Tests that an argument names, and tests that a change can affect."""

import ast
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / 'tests'
PACKAGES = ('moevement_ext', 'megatron/moevement', 'tools', 'examples', 'tests', 'scripts')
RULES = tuple((TESTS / 'unit').glob('test_*.py'))
"""Tests of the tree and its documents: they read files without importing them."""
JOBS = ('pretrain_gpt', 'moevement_ext.launch.command_line', 'moevement_ext.launch.torchrun')
"""Programs that the tests in the folders of `TRAINING` start."""
TRAINING = ('distributed', 'cluster', 'image', 'transformer_engine', 'gpu')
COMMAND = ROOT / 'moevement_ext' / 'command.py'
"""Names all programs; a change of one rarely affects the modules that import this file."""
EVERYTHING = ('pyproject.toml', 'setup.py', 'conftest.py', '.python-version', 'setup_env.sh')
"""File names that can affect any test."""


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


# ---- tests that a change can affect


def touched_by(revision: str) -> set[Path]:
    """Test files whose result may differ between a revision and the working tree."""
    changed = {ROOT / name for name in _changed_since(revision)}
    files = set(TESTS.rglob('test_*.py'))
    if any(path.name in EVERYTHING for path in changed):
        return files
    modules = {path for path in changed if path.suffix == '.py'}
    names = {path.name for path in changed - modules}
    return {*RULES, *(file for file in files if _sees(file, modules, names))}


def _changed_since(revision: str) -> Iterator[str]:
    for command in (
        ['diff', '--name-only', '--no-renames', revision],
        ['ls-files', '--others', '--exclude-standard'],
    ):
        done = subprocess.run(['git', *command], cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise UnknownName(f'--since {revision}: {done.stderr.strip()}')
        yield from done.stdout.splitlines()


def _sees(test: Path, modules: set[Path], names: set[str]) -> bool:
    """True if a test imports one of the modules in any way, or contains one of the names."""
    behind = reach(test)
    if test.relative_to(TESTS).parts[0] in TRAINING:
        behind = behind.union(*(reach(_file_of(job)) for job in JOBS))
    if behind & modules:
        return True
    texts = [_text(path) for path in behind if TESTS in path.parents] if names else []
    return any(name in text for name in names for text in texts)


@cache
def reach(file: Path | None) -> frozenset[Path]:
    """A file and all project files that it imports, directly or indirectly."""
    seen: set[Path] = set()
    waiting = [] if file is None else [file]
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += _imports(path)
    return frozenset(seen)


@cache
def _text(path: Path) -> str:
    return path.read_text('utf-8')


@cache
def _imports(path: Path) -> frozenset[Path]:
    """Project files that one file names: by import, or as a module that it starts."""
    found: set[Path | None] = set()
    nodes = list(ast.walk(ast.parse(_text(path))))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {_file_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = _whole_name(node, path)
            found |= {_file_of(module), *(_file_of(f'{module}.{one.name}') for one in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path != COMMAND:
            found |= set() if node in docstrings else _started(node.value)
    conftests = {parent / 'conftest.py' for parent in path.parents if parent != TESTS}
    if path.name.startswith('test_'):
        found |= {conftest for conftest in conftests if conftest.exists()}
    return frozenset(one for one in found if one is not None)


def _whole_name(node: ast.ImportFrom, path: Path) -> str:
    package = path.relative_to(ROOT).parts
    above = package[: len(package) - node.level] if node.level else ()
    return '.'.join([*above, *filter(None, [node.module])])


def _started(text: str) -> set[Path | None]:
    """Modules that a string names, such as `tools.demo`, `scripts/demo.sh`, `import tools.demo`."""
    if len(text) > 2000:
        return set()
    words = text.replace(';', ' ').replace('(', ' ').split()
    starts = ('moevement_ext', 'megatron.moevement', 'tools', 'examples', 'tests', 'pretrain_gpt')
    return {_file_of(word) for word in words if word.startswith(starts)}


@cache
def _file_of(module: str) -> Path | None:
    """Source file of a module of the project; None for other modules."""
    place = ROOT / module.removesuffix('.py').replace('.', '/')
    if not module or not module.replace('.', '').replace('_', '').replace('/', '').isalnum():
        return None
    if not (
        module.startswith('pretrain_gpt') or str(module.replace('.', '/')).startswith(PACKAGES)
    ):
        return None
    for path in (place.with_suffix('.py'), place / '__main__.py', place / '__init__.py'):
        if path.is_file():
            return path
    return None
