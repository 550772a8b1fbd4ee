# SPDX-License-Identifier: Apache-2.0
"""Rules about the shape of the code: which room may import which, sizes, and unneeded names.

Each list of exceptions is exact: what has been repaired must be taken off it.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.moevement.seams import patches

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ('moevement_ext', 'megatron', 'tools', 'examples', 'scripts', 'pretrain_gpt.py')
MAX_CONSTRUCTOR_ARGUMENTS = 7

ENGINE_FLOORS = (
    {'command', 'errors', 'logger'},
    {'event_file'},
    {'config', 'events'},
    {'faults', 'token_bucket', 'cpu_cost'},
    {'system', 'memory', 'regroup'},
    {'plan', 'store'},
    {'replicate'},
    {'capture', 'membership'},
    {'protect'},
    {'recover'},
    {'launch'},
    {'job'},
)
"""Folders and loose modules of the engine: each imports from floors before its own."""

ADAPTER_FLOORS = (
    {'built', 'facts'},
    {'seams'},
    {'state'},
    {'job'},
    {'arguments'},
    {'attachment', 'checking', 'program'},
    {'offline'},
    {'pretrain_gpt'},
)
"""As `ENGINE_FLOORS`."""

STILL_TO_REPAIR: set[tuple[str, str]] = set()
"""Arrows that run up."""

MANY_CONSTRUCTOR_ARGUMENTS: set[str] = set()
"""Classes still to be given fewer."""

NEEDED_BY_NO_PRODUCT_CODE = {
    'Figures.replication_lag': 'read by its name for the metrics',
    'Figures.window_age': 'read by its name for the metrics',
    'LossLogged.finite': 'read by its name for the metrics',
    'Recovered.by_scope': 'read by its name for the metrics',
    'InterruptibleStore.deleteKey': 'torch calls it: part of its Store interface',
    'InterruptibleStore.has_extended_api': 'torch calls it: part of its Store interface',
    'InterruptibleStore.multi_set': 'torch calls it: part of its Store interface',
    **{
        f'Line.{name}': 'asyncio calls it: part of its Protocol'
        for name in ('connection_made', 'data_received', 'connection_lost')
    },
    **{
        f'OutsideStore.{name}': 'torch calls it: part of its RendezvousHandler interface'
        for name in (
            'get_backend',
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


def sources(*names: str) -> dict[Path, ast.Module]:
    """Parsed Python files of folders and files, by path."""
    places = [ROOT / name for name in names]
    files = [
        file
        for place in places
        for file in ([place] if place.is_file() else sorted(place.rglob('*.py')))
    ]
    return {file: with_whole_names(file, ast.parse(file.read_text('utf-8'))) for file in files}


def with_whole_names(file: Path, tree: ast.Module) -> ast.Module:
    """With the module's dotted name in relative imports."""
    package = file.relative_to(ROOT).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package[: len(package) - node.level]
            node.module, node.level = '.'.join([*above, *filter(None, [node.module])]), 0
    return tree


# ---- rooms


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all that a source imports; of `from a import b` both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module is not None
            yield node.module
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def room_of(package: Path, dotted: str) -> str | None:
    """The folder or loose module of `package` that a dotted name lies in."""
    inside = f'{".".join(package.relative_to(ROOT).parts)}.'
    if not dotted.startswith(inside):
        return None
    room = dotted.removeprefix(inside).split('.')[0]
    return room if (package / room).is_dir() or (package / f'{room}.py').is_file() else None


def arrows(package: Path) -> set[tuple[str, str]]:
    """(room, room that it imports); the package's own __init__.py is no room."""
    found = set()
    for file, tree in sources(str(package.relative_to(ROOT))).items():
        room = file.relative_to(package).with_suffix('').parts[0]
        for dotted in imports_of(tree):
            other = room_of(package, dotted)
            if other not in (None, room) and room != '__init__':
                found.add((room, other))
    return found


STRATEGIES = {
    'moevement_ext.protect.expert_ledger',
    *(f'moevement_ext.plan.strategy.{name}' for name in ('dense', 'moc', 'moetion')),
}
"""What jobs of other strategies than the default import."""


def test_the_default_strategy_imports_no_other() -> None:
    """At the top of a module; a function of a job with another strategy may."""
    found = {
        file.relative_to(ROOT).as_posix()
        for file, tree in sources('moevement_ext', 'megatron').items()
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom) and set(imports_of(node)) & STRATEGIES
    }
    own = {f'{name.replace(".", "/")}.py' for name in STRATEGIES}
    assert found <= own
    assert all((ROOT / name).exists() for name in own)


def running_up(found: set[tuple[str, str]], floors: tuple[set[str], ...]) -> set[tuple[str, str]]:
    """Arrows that do not lead to an earlier floor."""
    floor = {room: number for number, rooms in enumerate(floors) for room in rooms}
    return {(here, there) for here, there in found if floor[here] <= floor[there]}


def test_rooms_of_the_engine_import_downwards() -> None:
    assert running_up(arrows(ROOT / 'moevement_ext'), ENGINE_FLOORS) == STILL_TO_REPAIR


def test_rooms_of_the_adapter_import_downwards() -> None:
    adapter = ROOT / 'megatron' / 'moevement'
    assert not running_up(arrows(adapter), ADAPTER_FLOORS)


@pytest.mark.parametrize(
    ('package', 'floors'),
    [('moevement_ext', ENGINE_FLOORS), ('megatron/moevement', ADAPTER_FLOORS)],
)
def test_every_room_has_its_floor(package: str, floors: tuple[set[str], ...]) -> None:
    folders = {path.parent.name for path in (ROOT / package).glob('*/__init__.py')}
    modules = {path.stem for path in (ROOT / package).glob('*.py')} - {'__init__'}
    assert sorted(folders | modules) == sorted(room for rooms in floors for room in rooms)


# ---- messages

NAMES_THE_PRODUCT = {
    'moevement_ext/logger.py': 'the place for all loggers',
    'moevement_ext/system/watchdog_process.py': 'has no logger, and writes to stderr itself',
}
"""Files that begin messages with the name of the product, and why."""


def test_one_place_prefixes_all_messages() -> None:
    found, loggers = set(), set()
    for file, tree in sources('moevement_ext', 'megatron/moevement').items():
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=str(text)) if text.startswith('sparse checkpointing:'):
                    found.add(file.relative_to(ROOT).as_posix())
                case ast.Call(func=ast.Attribute(attr='getLogger'), args=[ast.Name()] | []):
                    loggers.add(file.relative_to(ROOT).as_posix())
    assert found == set(NAMES_THE_PRODUCT)
    assert loggers == {'moevement_ext/logger.py'}


# ---- patches of upstream

PLACES_OF_PATCHES = {
    ('seams/patches.py', 'setattr'): 'the place for all parts of upstream',
    ('seams/cpu_device.py', 'setattr'): 'public names of torch that ask for a GPU',
    ('seams/cpu_device.py', 'torch'): 'the same',
    ('arguments.py', 'object'): 'error() of a parser of argparse, which upstream creates',
}
"""Where the adapter may change an imported module or class, or a function of an object, and why."""


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Package by name that an import of the installed packages binds, or an alias of one."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.split('.')[0]] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            bound |= {alias.asname or alias.name: node.module for alias in node.names}
    foreign = {
        name: dotted.split('.')[0]
        for name, dotted in bound.items()
        if dotted.startswith(('torch', 'megatron.core', 'megatron.training'))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            package = foreign.get(root_of(node.value))
            names = [target for target in targets(node) if isinstance(target, ast.Name)]
            foreign |= {name.id: package for name in names if package}
    return foreign


def root_of(node: ast.expr) -> str:
    """`a` of `a.b.c`; empty for what is no plain chain of attributes."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ''


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to or deletes."""
    if isinstance(node, ast.Assign | ast.Delete):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For):
        yield node.target


def is_function(value: ast.expr | None, functions: set[str]) -> bool:
    """True for a lambda, for one of these functions, and for a part or a wrapper of a function."""
    if isinstance(value, ast.Tuple):
        return any(is_function(one, functions) for one in value.elts)
    if isinstance(value, ast.Call):
        return any(one in ast.unparse(value.func) for one in ('partial', 'wraps', 'MethodType'))
    name = getattr(value, 'id', None) or getattr(value, 'attr', None)
    return isinstance(value, ast.Lambda) or name in functions


def patched(tree: ast.Module) -> Iterator[str]:
    """Packages whose modules or classes a source changes; 'setattr' where that is not known.

    'object', if it sets a function of an object that is not its own.
    """
    foreign = imported_names(tree)
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        for target in targets(node):
            if not isinstance(target, ast.Attribute) or ast.unparse(target.value) == 'self':
                continue
            if root_of(target) in foreign:
                yield foreign[root_of(target)]
            elif target.attr in patches.OBJECTS or is_function(
                getattr(node, 'value', None), functions
            ):
                yield 'object'
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ('setattr', 'delattr'):
            yield 'setattr'


def test_upstream_is_patched_in_one_place_only() -> None:
    adapter = ROOT / 'megatron' / 'moevement'
    found = {
        (str(file.relative_to(adapter)), what)
        for file, tree in sources('megatron/moevement').items()
        for what in patched(tree)
    }
    assert found == set(PLACES_OF_PATCHES)


@pytest.mark.parametrize(
    ('source', 'packages'),
    [
        ('import megatron.training.training as training\ntraining.train = f', {'megatron'}),
        ('from megatron.core import mpu\nmpu.a.b = f', {'megatron'}),
        ('def f():\n    from megatron.core.x import Class\n    Class.step = f', {'megatron'}),
        ('import torch\ntorch.distributed.new_group = f', {'torch'}),
        ('import torch\ncuda: Any = torch.cuda\ncuda.Stream = cuda.Event = f', {'torch'}),
        ('import torch\na, torch.b = 1, 2\ndel torch.c', {'torch'}),
        ('setattr(owner, name, f)', {'setattr'}),
        ('optimizer.step = f', {'object'}),
        ('del self.optimizer.prepare_grads', {'object'}),
        ('def f(): pass\nconfig.no_sync_func = f', {'object'}),
        ('class A:\n def f(self): self.model.no_sync_func = self.f', {'object'}),
        ('config.no_sync_func = lambda: None', {'object'}),
        ('config.no_sync_func = partial(f, 1)', {'object'}),
        ('class A:\n def f(self): self.f, self.config.a = lambda: 1, 2', {'object'}),
        ('class A:\n def f(self): self.g = lambda: 1', set()),
        ('config.no_sync_func = None\nargs.seed = config.seed = 1', set()),
        ('from megatron.core import get\nget().iteration = 1\nself.a = get', set()),
        ('from megatron.moevement.seams import upstream\nupstream.a = 1', set()),
    ],
)
def test_every_way_to_patch_is_seen(source: str, packages: set[str]) -> None:
    assert set(patched(ast.parse(source))) == packages


# ---- private names of upstream

PRIVATE_ELSEWHERE = {
    '_actions': 'of argparse',
    **dict.fromkeys(
        (
            '_apply_scale',
            '_data',
            '_is_first_fp8_module',
            '_quantizer',
            '_rowwise_data',
            '_rowwise_scale_inv',
            '_scale_inv',
            '_scales',
        ),
        'of Transformer Engine: tests/transformer_engine/test_sources.py looks for it',
    ),
}
"""Private names that no check at start knows, and why."""


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch('_[A-Za-z][A-Za-z0-9_]*', name) is not None


def private_names(tree: ast.Module) -> set[str]:
    """Private names that a source reads or sets, of objects other than its own classes'."""
    own, maybe_own, others = set(), set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(value=ast.Name(id='self' | 'cls'), attr=name, ctx=context):
                (own if isinstance(context, ast.Store) else maybe_own).add(name)
            case ast.Constant(value=str(name)):
                maybe_own.add(name)
            case ast.Attribute(attr=name):
                others.add(name)
            case ast.ImportFrom(names=names):
                others |= {alias.name for alias in names}
    return {name for name in others | (maybe_own - own) if is_private(name)}


def test_every_private_name_of_upstream_is_checked_at_start() -> None:
    found = {
        name for tree in sources('megatron/moevement').values() for name in private_names(tree)
    }
    parts = (*patches.UPSTREAM, *patches.TORCH, *patches.ATTRIBUTES)
    wrapped = {name for part in parts for name in re.split('[.:]', part)}
    read = {name for names in patches.ATTRIBUTES.values() for name in names if is_private(name)}
    assert found - wrapped == read | set(PRIVATE_ELSEWHERE)


@pytest.mark.parametrize(
    ('source', 'names'),
    [
        ('timer._elapsed += 1\ndel get()._timers', {'_elapsed', '_timers'}),
        ("getattr(module, '_fused_ops', None)", {'_fused_ops'}),
        ('from megatron.core.timers import _hidden', {'_hidden'}),
        ('class A(Upstream):\n def f(self): self._inherited', {'_inherited'}),
        ('class A:\n def __init__(self): self._a = 1\n def _f(self): self._a, self._f()', set()),
        ('class A:\n _a: int\n def f(self, b): self._a, b._a', {'_a'}),
        ("_NAME = '_quantizer'", {'_quantizer'}),
        ("f(a.__dict__, '_', 'a _b')", set()),
    ],
)
def test_every_way_to_touch_a_private_name_is_seen(source: str, names: set[str]) -> None:
    assert private_names(ast.parse(source)) == names


# ---- constructors


def constructor_arguments(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Classes that do something, with how many arguments their constructor takes.

    They write it themselves, or are dataclasses with a public method that returns nothing; one that
    only answers questions about its fields may have more of them. Of a dataclass, fields with a
    default do not count: mostly they are its state.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        for given in (item.args for item in methods if item.name == '__init__'):
            yield node.name, len(given.posonlyargs + given.args + given.kwonlyargs) - 1
        if is_dataclass(node) and any(is_action(item) for item in methods):
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            yield node.name, sum(item.value is None for item in fields)


def is_dataclass(node: ast.ClassDef) -> bool:
    decorators = (ast.unparse(item).split('(')[0] for item in node.decorator_list)
    return any(name in ('dataclass', 'dataclasses.dataclass') for name in decorators)


def is_action(method: ast.FunctionDef) -> bool:
    returned = method.returns
    nothing = isinstance(returned, ast.Constant) and returned.value is None
    return nothing and not method.name.startswith('_')


@pytest.mark.thorough
def test_constructors_take_few_arguments() -> None:
    counts = [count for tree in sources(*PRODUCT).values() for count in constructor_arguments(tree)]
    over = {name for name, count in counts if count > MAX_CONSTRUCTOR_ARGUMENTS}
    assert over == MANY_CONSTRUCTOR_ARGUMENTS


@pytest.mark.parametrize(
    ('source', 'counts'),
    [
        ('class A:\n    def __init__(self, a, /, b, *, c): ...', [('A', 3)]),
        (
            '@dataclass\nclass A:\n    a: int\n    b: int = 0\n    def f(self) -> None: ...',
            [('A', 1)],
        ),
        ('@dataclasses.dataclass(frozen=True)\nclass A:\n    def f(self) -> None: ...', [('A', 0)]),
        ('@dataclass\nclass A:\n    a: int\n    def f(self) -> int: ...', []),
        ('@dataclass\nclass A:\n    a: int\n    def _f(self) -> None: ...', []),
        ('class A(NamedTuple):\n    a: int\n    def f(self) -> None: ...', []),
    ],
)
def test_constructors_of_classes_that_do_something_are_seen(
    source: str, counts: list[tuple[str, int]]
) -> None:
    assert list(constructor_arguments(ast.parse(source))) == counts


# ---- unneeded names


@dataclass(frozen=True)
class Definition:
    """A public function, class or method."""

    shown: str
    name: str
    node: ast.AST


def definitions(tree: ast.Module) -> Iterator[Definition]:
    """All public ones of a module; not methods of private classes."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if not isinstance(node, kinds) or node.name.startswith('_'):
            continue
        yield Definition(node.name, node.name, node)
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(item, kinds) and not item.name.startswith('_'):
                yield Definition(f'{node.name}.{item.name}', item.name, item)


def mentions(tree: ast.AST) -> Counter[str]:
    """How often each name is read, called or written as an annotation; imports do not count."""
    names = (
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    return Counter(names) + Counter(_quoted_annotations(tree))


def _quoted_annotations(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for quoted in (getattr(node, 'annotation', None), getattr(node, 'returns', None)):
            if isinstance(quoted, ast.Constant) and isinstance(quoted.value, str):
                yield from mentions(ast.parse(quoted.value))


def public_surface() -> set[str]:
    """What `moevement_ext` offers to its users."""
    import moevement_ext

    return set(getattr(moevement_ext, '__all__', ()))


@pytest.mark.thorough
def test_every_public_name_of_the_engine_is_needed_by_the_product() -> None:
    trees = sources(*PRODUCT)
    by_file = {file: mentions(tree) for file, tree in trees.items()}
    everywhere: Counter[str] = sum(by_file.values(), Counter())

    def needed(name: str, file: Path, node: ast.AST) -> bool:
        elsewhere = everywhere[name] - by_file[file][name]
        return elsewhere > 0 or by_file[file][name] > mentions(node)[name]

    unneeded = {
        definition.shown
        for file, tree in trees.items()
        if ROOT / 'moevement_ext' in file.parents
        for definition in definitions(tree)
        if not needed(definition.name, file, definition.node)
    }
    assert unneeded - public_surface() == set(NEEDED_BY_NO_PRODUCT_CODE)
