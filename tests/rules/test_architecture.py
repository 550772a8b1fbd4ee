# SPDX-License-Identifier: Apache-2.0
"""Rules about the shape of the code: which room may import which, names, and types.

Each list of exceptions is exact: what has been repaired must be taken off it.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest

import moevement_ext
from tests.rules.trees import ADAPTER, ENGINE, PRODUCT, ROOT, imports_of, name_of, sources, text

ENGINE_FLOORS = (
    {'errors', 'logger'},
    {'config', 'events'},
    {'command', 'config_file', 'faults', 'rates'},
    {'system', 'memory', 'regroup'},
    {'plan', 'store', 'store_answers'},
    {'replicate'},
    {'capture', 'coordinator', 'membership'},
    {'protect'},
    {'recover'},
    {'launch'},
    {'job'},
)
"""Folders and loose modules of the engine: each imports from floors before its own."""

ADAPTER_FLOORS = (
    {'facts'},
    {'seams'},
    {'state'},
    {'job'},
    {'arguments'},
    {'attachment', 'checking', 'program'},
    {'offline'},
    {'pretrain_gpt'},
)
"""As `ENGINE_FLOORS`."""

NEEDED_BY_NO_PRODUCT_CODE = {
    'CoordinatorClient.ask': 'no job asks the coordinator yet',
    'Figures.replication_lag': 'read by its name for the metrics',
    'Figures.window_age': 'read by its name for the metrics',
    'LossLogged.finite': 'read by its name for the metrics',
    'Recovered.by_scope': 'read by its name for the metrics',
    'ForkingLogsSpecs': 'torchrun loads it by its entry point in setup.py',
    'plug_in': 'torchrun loads it by its entry point in setup.py',
    'Seats.next_rendezvous': 'torch calls it: part of its RendezvousHandler interface',
    'InterruptibleStore.deleteKey': 'torch calls it: part of its Store interface',
    'InterruptibleStore.has_extended_api': 'torch calls it: part of its Store interface',
    'InterruptibleStore.multi_set': 'torch calls it: part of its Store interface',
    **{
        f'OutsideStore.{name}': 'torch calls it: part of its RendezvousHandler interface'
        for name in (
            'get_run_id',
            'is_closed',
            'next_rendezvous',
            'num_nodes_waiting',
            'set_closed',
            'use_agent_store',
        )
    },
}
"""Public names of the engine that stay all the same, and why."""


# ---- rooms


def room_of(package: str, dotted: str) -> str | None:
    """The folder or loose module of `package` that a dotted name lies in."""
    _, inside, rest = dotted.partition(f'{package.replace("/", ".")}.')
    room = ROOT / package / rest.split('.')[0]
    return room.name if inside and (room.is_dir() or room.with_suffix('.py').is_file()) else None


def arrows(package: str) -> set[tuple[str, str]]:
    """(room, room that it imports); the package's own __init__.py is no room."""
    found = set()
    for file, tree in sources(package).items():
        room = file.relative_to(ROOT / package).with_suffix('').parts[0]
        for other in (room_of(package, dotted) for dotted in imports_of(tree)):
            if other not in (None, room) and room != '__init__':
                found.add((room, other))
    return found


@pytest.mark.parametrize(
    ('package', 'floors'), [(ENGINE, ENGINE_FLOORS), (ADAPTER, ADAPTER_FLOORS)]
)
def test_rooms_import_downwards(package: str, floors: tuple[set[str], ...]) -> None:
    folders = {path.parent.name for path in (ROOT / package).glob('*/__init__.py')}
    modules = {path.stem for path in (ROOT / package).glob('*.py')} - {'__init__'}
    assert sorted(folders | modules) == sorted(room for rooms in floors for room in rooms)
    floor = {room: number for number, rooms in enumerate(floors) for room in rooms}
    found = arrows(package)
    assert found and not {(a, b) for a, b in found if floor[a] <= floor[b]}


def test_engine_never_imports_megatron() -> None:
    found = {(name_of(file), one) for file, tree in sources(ENGINE).items()
             for one in imports_of(tree)}  # fmt: skip
    assert not {(file, one) for file, one in found if one.split('.')[0] == 'megatron'}


STRATEGIES = {
    'moevement_ext.protect.expert_ledger',
    *(f'moevement_ext.plan.strategy.{name}' for name in ('dense', 'moc', 'moetion')),
}
"""What jobs of other strategies than the default import."""


def test_the_default_strategy_imports_no_other() -> None:
    """At the top of a module; a function of a job with another strategy may."""
    found = {
        name_of(file)
        for file, tree in sources(ENGINE, 'megatron').items()
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom) and set(imports_of(node)) & STRATEGIES
    }
    own = {f'{name.replace(".", "/")}.py' for name in STRATEGIES}
    assert found <= own and all((ROOT / name).exists() for name in own)


# ---- messages

NAMES_THE_PRODUCT = {
    'moevement_ext/logger.py': 'the place for all loggers',
    'moevement_ext/system/watchdog_process.py': 'has no logger, and writes to stderr itself',
}
"""Files that begin messages with the name of the product, and why."""


def test_one_place_prefixes_all_messages() -> None:
    found, loggers = set(), set()
    for file, tree in sources(ENGINE, ADAPTER).items():
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=str(text)) if text.startswith('sparse checkpointing:'):
                    found.add(name_of(file))
                case ast.Call(func=ast.Attribute(attr='getLogger'), args=[ast.Name()] | []):
                    loggers.add(name_of(file))
    assert found == set(NAMES_THE_PRODUCT)
    assert loggers == {'moevement_ext/logger.py'}


# ---- names

MEANT_TO_BE_ALIKE = {'__init__.py', '__main__.py', 'slurm.py', 'torchrun.py'}
"""The last two stand for commands that were elsewhere."""


def test_a_name_has_one_meaning() -> None:
    """In engine and adapter, of a class as of a file."""
    files = sources(ENGINE, ADAPTER)
    names = [path.name for path in files if path.name not in MEANT_TO_BE_ALIKE]
    names += [n.name for tree in files.values() for n in tree.body if isinstance(n, ast.ClassDef)]
    assert not {name for name, count in Counter(names).items() if count > 1}


def test_no_struct_is_decoded_without_a_decoder_of_its_module() -> None:
    """msgspec 0.22 crashes if two threads decode the first object of a type at the same time."""
    harmless = {'int', 'list[bytes]', 'kind'}  # without fields; read by one thread
    found = {
        (name_of(path), kind)
        for path in sources(ENGINE, ADAPTER)
        for kind in re.findall(r'\.(?:decode|convert)\(.*type=([^)]+)\)', text(path))
    }
    assert not {(path, kind) for path, kind in found if kind not in harmless}


# ---- types

READS_ARGUMENTS = {
    *('arguments.py', 'checking.py', 'facts.py', 'job/layout_choice.py', 'pretrain_gpt.py'),
    'program.py',
}
"""Make facts, settings and counters of upstream's arguments; besides these only `seams` has them,
where upstream hands them over or gives them away; and `offline`, a program that never trains."""


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
        str(path.relative_to(ROOT / ADAPTER))
        for path, tree in sources(ADAPTER).items()
        if any(takes_arguments(tree))
    }
    assert {one for one in taking if not one.startswith(('seams/', 'offline/'))} == READS_ARGUMENTS


# ---- unneeded names


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Public functions, classes and methods of a module; not methods of private classes."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, kinds) and not node.name.startswith('_'):
            yield node.name, node
            for item in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(item, kinds) and not item.name.startswith('_'):
                    yield f'{node.name}.{item.name}', item


def mentions(tree: ast.AST) -> Counter[str]:
    """How often each name is read, called or written as an annotation; imports do not count."""
    found = Counter[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            found[node.id if isinstance(node, ast.Name) else node.attr] += 1
        for quoted in (getattr(node, 'annotation', None), getattr(node, 'returns', None)):
            if isinstance(quoted, ast.Constant) and isinstance(quoted.value, str):
                found += mentions(ast.parse(quoted.value))
    return found


@pytest.mark.thorough
def test_every_public_name_of_the_engine_is_needed_by_the_product() -> None:
    everywhere = sum((mentions(tree) for tree in sources(*PRODUCT).values()), Counter[str]())
    unneeded = {
        shown
        for tree in sources(ENGINE).values()
        for shown, node in definitions(tree)
        for name in [shown.rpartition('.')[2]]
        if everywhere[name] <= mentions(node)[name]
    }
    assert unneeded - set(moevement_ext.__all__) == set(NEEDED_BY_NO_PRODUCT_CODE)
