# SPDX-License-Identifier: Apache-2.0
"""Rules about upstream: where the adapter changes it, and which private names it needs."""

import ast
import re
from collections.abc import Iterator

from megatron.moevement.seams import patches
from tests.rules.trees import ADAPTER, ROOT, sources

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
    found = {
        (str(file.relative_to(ROOT / ADAPTER)), what)
        for file, tree in sources(ADAPTER).items()
        for what in patched(tree)
    }
    assert found == set(PLACES_OF_PATCHES)


# ---- private names

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
    found = {name for tree in sources(ADAPTER).values() for name in private_names(tree)}
    parts = (*patches.UPSTREAM, *patches.TORCH, *patches.ATTRIBUTES)
    wrapped = {name for part in parts for name in re.split('[.:]', part)}
    read = {name for names in patches.ATTRIBUTES.values() for name in names if is_private(name)}
    assert found - wrapped == read | set(PRIVATE_ELSEWHERE)
