# SPDX-License-Identifier: Apache-2.0
"""`docs/design.md` and the tree agree: invariants, tests, files, threads, collectives."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rules.trees import ROOT, python_files, text, tree

DESIGN = ROOT / 'docs' / 'design.md'
PAGES = [DESIGN, *(ROOT / 'docs').glob('*.md'), *ROOT.glob('*.md'), ROOT / 'tests' / 'README.md']
PRODUCT = ('moevement_ext', 'megatron')

# Collectives of ours, and when they happen; all of them outside of fault-free iterations.
COLLECTIVES = {
    'exchange.py': 'at the start',
    'trainer_state.py': 'in a recovery',
    'dp_copy.py': 'in a recovery',
    'optimizer_state.py': 'in a recovery',
    'module_operators.py': 'in a recovery',
    'ending.py': 'at the end',
    'program.py': 'at the end',
    'digest_file.py': 'at the end',
    'expert_slots.py': 'in an iteration, only if experts have slots',
}


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call))


def invariants() -> dict[str, str]:
    found = re.findall(r'^### (I\d+) [^\n]*\n(.*?)(?=^##)', text(DESIGN), re.M | re.S)
    return dict(found)


def test_there_are_eight_invariants_in_order() -> None:
    assert list(invariants()) == [f'I{number}' for number in range(1, 9)]


def test_every_invariant_that_is_cited_is_there() -> None:
    files = [*python_files(*PRODUCT, 'tools', 'tests'), *PAGES]
    cited = {found for path in files for found in re.findall(r'\bI\d+\b', text(path))}
    assert len(cited) > 3
    assert cited <= invariants().keys()


def test_every_invariant_names_tests() -> None:
    for number, said in invariants().items():
        assert re.search(r'Tests?:\s+`test_', said), number


def existing_tests() -> set[str]:
    return {
        node.name
        for path in python_files('tests')
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith('test_')
    }


def test_every_test_that_is_named_exists() -> None:
    named = {name for page in PAGES for name in re.findall(r'`(test_\w+)`', text(page))}
    assert len(named) > 40
    assert named <= existing_tests()


@pytest.mark.parametrize('page', sorted(set(PAGES)), ids=lambda page: page.name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    for code in re.findall(r'`([^`\n]+)`', text(page)):
        if re.fullmatch(r'[\w.-]+(/[\w.-]+)+/?', code) and code.split('/')[0] in top_level():
            assert (ROOT / code).exists(), code
        elif re.fullmatch(r'test_\w+\.py', code):
            assert (ROOT / 'tests' / 'distributed' / code).exists(), code


def top_level() -> set[str]:
    """Of the project; what the demo and tools have written is in `runs`."""
    return {path.name for path in ROOT.iterdir()} - {'runs'}


# ---- threads


def thread_names() -> dict[str, str]:
    """File by name; of a name with a number in it, the part before that."""
    names = {}
    for path in python_files(*PRODUCT):
        for call in calls(path):
            if ast.unparse(call.func).split('.')[-1] in ('Thread', 'ThreadPoolExecutor'):
                given = {k.arg: k.value for k in call.keywords}
                name = given.get('name', given.get('thread_name_prefix'))
                if isinstance(name, ast.JoinedStr):
                    name = name.values[0]
                known = name.value if isinstance(name, ast.Constant) else '(a pool without a name)'
                names[str(known)] = path.name
    return names


def test_every_thread_is_in_the_table_and_no_other() -> None:
    table = re.findall(r'^\| (?:`([\w-]+)(?:<\w+>)?`|(\(a pool[^|]*\)))', threads_section(), re.M)
    listed = {name or pool for name, pool in table}
    assert len(listed) > 12
    assert listed == set(thread_names())


def threads_section() -> str:
    whole = text(DESIGN)
    return whole[whole.index('## Threads') : whole.index('## Keys of the store')]


# ---- keys of the store


def test_every_key_of_a_round_is_in_the_table_and_no_other() -> None:
    source = (ROOT / 'moevement_ext' / 'membership' / 'rendezvous.py').read_text('utf-8')
    forgotten = re.search(r"r'\(\?:([a-z|]+)\)/", source)
    assert forgotten is not None
    _, _, section = text(DESIGN).partition('\n## Keys of the store\n')
    keys = ' '.join(re.findall(r'^\| (`.*?) \|', section, re.M))
    assert set(re.findall(r'`(\w+)/<e>', keys)) == set(forgotten[1].split('|'))


# ---- collectives


def test_engine_has_no_collective_in_an_iteration() -> None:
    """Invariant I8: those that there are happen elsewhere, see the list."""
    found = {
        path.name
        for path in python_files(*PRODUCT)
        for call in calls(path)
        if re.fullmatch(
            r'((torch\.)?distributed\.|dist\.)?(all_reduce|all_gather\w*|all_to_all\w*|broadcast\w*|'
            r'reduce|reduce_scatter\w*|gather\w*|scatter\w*|barrier)',
            ast.unparse(call.func),
        )
    }
    assert found == COLLECTIVES.keys()
