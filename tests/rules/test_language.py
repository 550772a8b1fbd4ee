# SPDX-License-Identifier: Apache-2.0
"""Docstrings, comments and pages are plain technical English, where listed here."""

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
PAGES = sorted(
    [*ROOT.glob('*.md'), *ROOT.glob('docs/*.md'), *ROOT.glob('findings/*.md')]
    + [ROOT / 'tests' / 'README.md']
)

# A process is a rank, a worker, a launcher, a holder: each has a noun.
PERSONS = re.compile(r'\b(who|whoever|nobody|somebody|everybody)\b', re.IGNORECASE)

# What to write, and the words that it replaces. In pages only.
DIALECT = {
    'again, from scratch': r'anew',
    'uselessly': r'in vain',
    'the previous, earlier': r'of before|the (one|ones|life|lives) before',
    'name the noun': r'such a one|what of|so many|so often',
    'must be; or active': r'(is|are|was|were) to be',
    'forever; or say which limit': r'without end',
    'custom, your own': r"one's own|of ours|of yours",
    'the project, this page; or passive': r'we|our|ours',
    'recover, return, restart': r'(come|comes|came|coming) back',
    'rendezvous': r'(ranks|workers|processes|all|they) (meet|met)',
    'as usual': r'as ever',
    'skip, or ignore': r'(pass|passes|passed) over',
    'except': r'but for',
}


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
def test_words_for_persons_are_found(source: str, offends: bool) -> None:
    assert bool(persons(source)) is offends


def without_code(page: str) -> str:
    """A page with spaces for code (fenced, indented or in backticks) and for targets of links."""
    fences = re.compile(r'^```.*?^```', re.M | re.S)
    blocks = re.compile(r'(?<=\n\n)(?: {4}.*\n)+')
    for code in (fences, blocks, re.compile(r'`[^`]*`'), re.compile(r'\]\([^)\s]*\)')):
        page = code.sub(lambda found: re.sub(r'[^\n]', ' ', found[0]), page)
    return page


def dialect(page: str) -> list[str]:
    """Words of the dialect, also across lines, with the line and what to write instead."""
    text = without_code(page)
    return [
        f'{text.count("\n", 0, found.start()) + 1}: {" ".join(found[0].split())!r}; write: {plain}'
        for plain, words in DIALECT.items()
        for found in re.finditer(rf'\b({words.replace(" ", r"\s+")})\b', text, re.IGNORECASE)
    ]


@pytest.mark.parametrize(
    ('page', 'found'),
    [
        ('Groups are connected anew.\n', 1),
        ('A window that is to be kept comes back.\n', 2),
        ('We restart, and all met in our store.\n', 3),
        ('```text\nanew\n```\n', 0),
        ('Text:\n\n    comes back from: window 3\n\nText.\n', 0),
        ('- A list\n  comes\n  back in\n    its third line, as ever.\n', 2),
        ('The system `ours` of\n`tools as ever` and [this](anew.md#what-of).\n', 0),
        ('The power of it, goes only once, renewed.\n', 0),
    ],
)
def test_the_dialect_is_found(page: str, found: int) -> None:
    assert len(dialect(page)) == found


def test_pages_have_plain_words() -> None:
    offenders = [
        f'{page.relative_to(ROOT)}:{found}'
        for page in PAGES
        for found in dialect(page.read_text('utf-8'))
    ]
    assert not offenders


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
        for path in (*sources(), *sorted((ROOT / 'tests').rglob('*.py')))
        for found in persons(path.read_text('utf-8'), path.suffix == '.py')
    ]
    offenders += [
        f'{page.relative_to(ROOT)}:{number}: {line}'
        for page in PAGES
        for number, line in enumerate(page.read_text('utf-8').splitlines(), 1)
        if PERSONS.search(line)
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
