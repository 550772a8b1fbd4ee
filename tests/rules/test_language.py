# SPDX-License-Identifier: Apache-2.0
"""Docstrings, comments and pages are plain technical English, where listed here."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.rules.trees import ROOT, name_of, python_files, text

SOURCES = ('moevement_ext', 'megatron', 'tools', 'examples', 'scripts', 'pretrain_gpt.py')
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


def test_offences_are_found() -> None:
    """In docstrings, comments and pages, and nowhere else."""
    for source in ('"""Whoever calls."""', 'x = 1  # who knows', 'def f():\n "Nobody."'):
        assert persons(source)
    assert not persons("x = 'who'") and not persons('# The whole of it.')
    assert len(dialect('- A list\n  comes\n  back in\n    its third line, as ever.\n')) == 2
    assert not dialect('```text\nanew\n```\n`we` [this](anew.md#what-of)\n\n    in vain\n')


def test_pages_have_plain_words() -> None:
    offenders = [f'{name_of(page)}:{found}' for page in PAGES for found in dialect(text(page))]
    assert not offenders


def test_processes_are_no_persons() -> None:
    scripts = (path for path in (ROOT / 'scripts').iterdir() if path.suffix in ('.sh', '.sbatch'))
    offenders = [
        f'{name_of(path)}:{found}'
        for path in (*python_files(*SOURCES, 'tests'), *scripts)
        for found in persons(text(path), path.suffix == '.py')
    ]
    offenders += [
        f'{name_of(page)}:{number}: {line}'
        for page in PAGES
        for number, line in enumerate(text(page).splitlines(), 1)
        if PERSONS.search(line)
    ]
    assert not offenders
