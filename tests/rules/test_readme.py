# SPDX-License-Identifier: Apache-2.0
"""What the documents say is so: flags, figures, snippets, commands, links."""

import ast
import inspect
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.moevement.seams import cpu_device
from tests.rules.trees import ROOT, name_of
from tests.support.each import each

if cpu_device.needed():
    cpu_device.install()

from megatron.moevement.attachment import Attachment  # noqa: E402
from moevement_ext.config import SparseCheckpointConfig  # noqa: E402
from moevement_ext.memory.window.format import GENERATIONS  # noqa: E402
from tools import flags  # noqa: E402
from tools.chaos.__main__ import parse_arguments, verdict  # noqa: E402
from tools.chaos.results import Results  # noqa: E402
from tools.model.layout import Precision  # noqa: E402

README = ROOT / 'README.md'
MEASURED = ROOT / 'docs' / 'measured.md'
TESTS = ROOT / 'tests' / 'README.md'
PAGES = sorted(
    [
        *ROOT.glob('*.md'),
        *(p for f in ('docs', 'tests', 'examples', 'deploy') for p in (ROOT / f).rglob('*.md')),
        ROOT / 'findings' / 'README.md',
    ]
)
MOST_CHARACTERS = 100


def section(page: Path, title: str) -> str:
    """What stands below a heading of the second level."""
    found = re.search(rf'^## {title}\n(.*?)(?=^## |\Z)', page.read_text('utf-8'), re.M | re.S)
    assert found, f'{name_of(page)} has no section {title}'
    return found[1]


def rows(text: str) -> Iterator[list[str]]:
    """Cells of the tables in a text, without heads."""
    for line in re.findall(r'^\|(?! *-)(.*)\|$', text, re.M)[1:]:
        yield [cell.strip() for cell in line.split('|')]


# ---- flags


def test_the_page_of_flags_is_up_to_date() -> None:
    """If not: `python -m tools.flags --write`."""
    assert flags.DOCUMENT.read_text('utf-8') == flags.document()


def test_tables_of_fields_are_up_to_date() -> None:
    """If not: as above."""
    page = flags.API.read_text('utf-8')
    assert flags.with_fields(page) == page
    assert flags.with_fields(page.replace('| `disk_every` |', '| `disk` |')) == page


def test_readme_has_six_flags_with_their_defaults() -> None:
    shown = {row[0]: row[1].strip('`') for row in rows(section(README, 'Flags'))}
    defaults = {flag: default.strip('`') for flag, default, _ in flags.rows()}
    assert len(shown) == 6
    assert shown == {flag: defaults[flag] for flag in shown}


def test_rule_of_thumb_for_host_memory_follows_from_the_files() -> None:
    per_place = GENERATIONS * Precision().full_bytes
    places = 1 + SparseCheckpointConfig().replicas
    said = (
        f'{per_place} bytes per parameter in each of 1 + r places, so {per_place * places} in all'
    )
    assert said in ' '.join(section(README, 'Protect a run').split())


_READ = re.compile(r"""(?:environ(?:\.\w+\(|\[)|\n *os\.environ )'([A-Z_]+)'|\b(MOEVEMENT_[A-Z_]+)
    |\$\{([A-Z_]+):""", re.VERBOSE)  # fmt: skip
_OF_OTHERS = re.compile(
    r'SLURM|TORCH|(RANK|WORLD_SIZE|LOCAL_|GROUP_|MASTER_|COMP_|PWD|PYTHONPATH|LD_|PYTORCH_|CUDA_HOME)'
)
"""Variables that launchers of others, shells and libraries define."""
_OF_SOURCES = {'MOEVEMENT_SPARES'}
"""What a program declares in its source."""


def test_every_variable_of_the_environment_is_in_the_table() -> None:
    files = [*ROOT.glob('scripts/slurm_*'), *(
        file for folder in ('moevement_ext', 'megatron', 'tools') for file in
        (ROOT / folder).rglob('*.py'))]  # fmt: skip
    texts = [file.read_text('utf-8') for file in files]
    read = {next(filter(None, found)) for text in texts for found in _READ.findall(text)}
    named = {name for name in read if not _OF_OTHERS.match(name)} - _OF_SOURCES
    table = {name for group in flags._TEXTS['variables'].values() for name in group}
    assert 'MOEVEMENT_SECRET' in named and 'GRACE' in named
    assert named <= table, named - table
    assert not [name for name in table if not any(name in text for text in texts)]


def test_every_flag_with_a_page_exists() -> None:
    assert flags.MORE.keys() <= {flag.strip('`') for flag, _, _ in flags.rows()}


# ---- snippets


def snippets() -> list[Any]:
    found = [
        pytest.param(code, id=f'{name_of(page)}-{number}')
        for page in PAGES
        for number, code in enumerate(
            re.findall(r'^```python\n(.*?)^```', page.read_text('utf-8'), re.M | re.S)
        )
    ]
    assert len(found) >= 2
    return found


@pytest.mark.parametrize('code', snippets())
def test_snippet_compiles_and_calls_existing_names(code: str) -> None:
    """Its imports are carried out, and calls of what they bring held against the signatures."""
    tree = ast.parse(code)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(imports, []), '<snippet>', 'exec'), names)
    job = Attachment if 'attach' in names else names['Job']
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == 'job':
            assert hasattr(job, node.attr), node.attr
        elif isinstance(node, ast.Call):
            called = names.get(ast.unparse(node.func))
            if getattr(called, '__module__', '').startswith(('megatron', 'moevement_ext')):
                given = {keyword.arg: keyword for keyword in node.keywords if keyword.arg}
                inspect.signature(called).bind(*node.args, **given)


# ---- figures


def figures_in(file: Path) -> list[float]:
    text = file.read_text('utf-8')
    if file.suffix == '.json':
        text = json.dumps(json.loads(text), indent=0)
    return [float(found) for found in re.findall(r'(?<![\w.])-?\d+(?:\.\d+)?(?![\w.])', text)]


def quoted(text: str) -> list[str]:
    """Figures in a text; not those in code, links, words and units of range."""
    text = re.sub(r'`[^`]*`|\]\([^)]*\)', '', text).replace(',', '')
    return re.findall(r'(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\w)', text)


def test_every_measured_figure_comes_from_its_file() -> None:
    lines = re.split(r'^- ', section(README, 'Measured'), flags=re.M)[1:]
    assert len(lines) >= 5
    for line in lines:
        (file,) = re.findall(r'\]\((docs/measurements/[^)]+)\)', line)
        assert quoted(line), line
        check_figures(quoted(line), ROOT / file)


@pytest.mark.parametrize(
    'title',
    [
        'Overhead',
        'Overhead of a longer run',
        'Narrow formats',
        'Losses in narrow formats',
        'All workers killed',
        'One worker killed',
    ],
)
def test_every_figure_of_a_table_comes_from_its_file(title: str) -> None:
    text = section(MEASURED, title)
    cells = [cell for row in rows(text) for cell in row]
    assert len(quoted(' '.join(cells))) > 5
    check_figures(quoted(' '.join(cells)), measurement_of(text))


def test_every_figure_of_the_summary_is_in_its_section() -> None:
    """The table above the first section names, in each row, the sections that it quotes."""
    page = MEASURED.read_text('utf-8')
    summary = list(rows(page[: page.index('\n## ')]))
    assert len(summary) > 5
    for question, result, links in summary:
        titles = re.findall(r'\[([^\]]+)\]\(#', links)
        sections = ' '.join(section(MEASURED, title) for title in titles)
        assert titles and quoted(result), question
        known = figures_of(sections)
        assert not [figure for figure in quoted(result) if figure not in known], question


def figures_of(text: str) -> set[str]:
    """All figures of a text, also in commands and program output."""
    return set(re.findall(r'\d+(?:\.\d+)?', text.replace(',', '')))


def test_figures_of_process_groups_come_from_their_file() -> None:
    text = section(MEASURED, 'Process groups')
    assert len(quoted(text)) > 4
    check_figures(quoted(text), measurement_of(text))


@pytest.mark.parametrize('title', ['Campaign', 'Without spare nodes'])
def test_figures_of_a_drawn_campaign_match_its_results(title: str) -> None:
    """Its command, the faults of each kind and its last line."""
    text = section(MEASURED, title)
    results = Results(measurement_of(text))
    arguments = [one for one in results.begun.arguments if one != '--fork']
    for name in {'--cover', '--max-stall'}.intersection(arguments):  # of that commit, as is --fork
        at = arguments.index(name)
        del arguments[at : at + 2]
    command = re.search(r'moevement chaos ((?:.*\\\n)*.*)\n', text)
    assert command is not None and shlex.split(command[1].replace('\\\n', '')) == arguments
    struck = Counter(fault.fault.split()[0] for fault in results.faults)
    assert {row[0].strip('`'): int(row[1]) for row in rows(text)} == struck
    drawn = len({job.configuration for job in results.jobs})
    assert f'{len(results.jobs)} jobs of {drawn} drawn configurations' in text
    args = parse_arguments(arguments)
    assert results.summary() in ' '.join(text.split())
    assert verdict(args, results) == 0


def measurement_of(text: str) -> Path:
    """The file that a section is written from."""
    (file,) = re.findall(r'\]\((measurements/[^)]+)\)', text)
    return ROOT / 'docs' / file


def check_figures(figures: list[str], file: Path) -> None:
    measured = figures_in(file)
    for figure in figures:
        digits = len(figure.partition('.')[2])
        assert float(figure) in {round(value, digits) for value in measured}, (figure, file.name)


# ---- failures


def test_every_failure_that_is_recovered_from_has_its_tests() -> None:
    """The table of tests has, among others, the failures of README's under the same names."""
    matrix = [row[0] for row in rows(section(README, 'What is recovered from what'))]
    shown = [row[0] for row in rows(section(TESTS, 'What shows the rows of the failure matrix'))]
    assert len(matrix) > 10
    assert not [failure for failure in matrix if failure not in shown]
    assert len(shown) == len(set(shown))


# ---- form


@each('page', PAGES)
def test_lines_are_short(page: Path) -> None:
    """But for tables, also those that a program prints, and links."""
    long = [
        line
        for line in page.read_text('utf-8').splitlines()
        if len(line) > MOST_CHARACTERS and not line.startswith(('|', '│')) and '](' not in line
    ]
    assert not long


@each('page', PAGES)
def test_links_have_targets(page: Path) -> None:
    for target in re.findall(r'\]\(([^)\s]+)\)', page.read_text('utf-8')):
        if '://' in target:
            continue
        file, _, anchor = target.partition('#')
        other = (page.parent / file).resolve() if file else page
        assert other.exists(), target
        if anchor:
            assert anchor in anchors(other), target


def anchors(page: Path) -> set[str]:
    titles = re.findall(r'^#+ (.*)$', page.read_text('utf-8'), re.M)
    return {re.sub(r'[^\w -]', '', title).lower().replace(' ', '-') for title in titles}
