# SPDX-License-Identifier: Apache-2.0
"""Private parts of Transformer Engine that the adapter touches are where it looks for them.

Read off its sources, so that neither its kernels nor its compiled extension are needed. Where it
is not installed, the wheel `transformer_engine` alone will do, which has all of its Python:

    pip download --no-deps transformer_engine==2.20.2 && unzip -q transformer_engine-*.whl -d te
    MOEVEMENT_TE_SOURCES=$PWD/te pytest --thorough tests/transformer_engine/test_sources.py

An upgrade that moves a part is red.
"""

import ast
import functools
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron.moevement.state import broken_iteration, low_precision

SCALED, BLOCKS = zip(low_precision._BYTES, low_precision._SCALES, strict=True)
"""Attributes of tensors with one scale, and with a scale for each block."""

pytestmark = [pytest.mark.transformer_engine, pytest.mark.thorough]


def root() -> Path:
    """The folder of its part for torch; nothing of it is imported."""
    unpacked = os.environ.get('MOEVEMENT_TE_SOURCES')
    if unpacked:
        return Path(unpacked) / 'transformer_engine' / 'pytorch'
    try:
        spec = find_spec('transformer_engine')
    except ValueError:  # hidden from upstream
        spec = None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip('needs the wheel transformer_engine, unpacked (MOEVEMENT_TE_SOURCES)')
    return Path(spec.submodule_search_locations[0]) / 'pytorch'


@functools.cache
def tree(file: str) -> ast.Module:
    return ast.parse((root() / file).read_text('utf-8'))


def class_of(file: str, name: str) -> ast.ClassDef:
    found = [node for node in ast.walk(tree(file)) if isinstance(node, ast.ClassDef)]
    (one,) = [node for node in found if node.name == name]
    return one


def parameters(kind: ast.ClassDef, method: str) -> list[str]:
    functions = [node for node in kind.body if isinstance(node, ast.FunctionDef)]
    (one,) = [node for node in functions if node.name == method]
    every = (*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs)
    return [argument.arg for argument in every]


def attributes_set(node: ast.AST) -> Iterator[str]:
    """Names that are assigned to an attribute of whatever."""
    for found in ast.walk(node):
        if isinstance(found, ast.Attribute) and isinstance(found.ctx, ast.Store):
            yield found.attr


def declared(node: ast.AST) -> set[str]:
    found = (one.target for one in ast.walk(node) if isinstance(one, ast.AnnAssign))
    return {name.id for name in found if isinstance(name, ast.Name)}


ADAM = 'optimizers/fused_adam.py', 'FusedAdam'
LAYER = 'module/base.py', 'TransformerEngineBaseModule'
HOOK = 'wgrad_accumulation_and_reduce_hook'


@pytest.mark.parametrize(
    ('kind', 'method', 'expected'),
    [
        (ADAM, '_apply_scale', 'self state_name unscaled_state scaled_state scale'),
        (ADAM, 'initialize_state', 'self param store_param_remainders'),
        (LAYER, 'init_fp8_metadata', 'self num_gemms'),
        (LAYER, 'backward_dw', 'self'),
        (LAYER, 'register_wgrad_accumulation_and_reduce_hooks', f'self {HOOK}'),
    ],
)
def test_methods_that_are_overridden_or_called_take_the_same(
    kind: tuple[str, str], method: str, expected: str
) -> None:
    assert parameters(class_of(*kind), method) == expected.split()


@pytest.mark.parametrize(
    ('file', 'kind', 'names'),
    [
        (*ADAM, ['name_to_dtype_map', 'master_weight_dtype', '_scales']),
        (*LAYER, [broken_iteration.QUEUE]),
        ('ops/basic/grouped_linear.py', 'GroupedLinear', [broken_iteration.QUEUE]),
        ('module/_common.py', 'WeightGradStore', ['context']),
        ('tensor/float8_tensor.py', 'Float8Quantizer', ['scale']),
        ('tensor/storage/float8_tensor_storage.py', None, ['_quantizer']),
        *(
            (f'tensor/storage/{name}_tensor_storage.py', None, pair)
            for name, pair in zip(
                ('float8', 'float8_blockwise', 'mxfp8'), (SCALED, BLOCKS, BLOCKS), strict=True
            )
        ),
    ],
)
def test_attributes_that_are_read_and_set_are_there(
    file: str, kind: str | None, names: list[str]
) -> None:
    node = tree(file) if kind is None else class_of(file, kind)
    assert {*names} <= {*attributes_set(node)}


@pytest.mark.parametrize(
    ('file', 'name'),
    [
        ('attention/dot_product_attention/dot_product_attention.py', 'DotProductAttention'),
        ('module/layernorm_mlp.py', 'LayerNormMLP'),
    ],
)
def test_layers_of_several_products_have_as_many_scales(file: str, name: str) -> None:
    """One that begins a pass with another number would have other scales than are captured."""
    given = {
        keyword.value.value
        for found in ast.walk(class_of(file, name))
        if isinstance(found, ast.Call)
        for keyword in found.keywords
        if keyword.arg == 'num_gemms' and isinstance(keyword.value, ast.Constant)
    }
    assert low_precision._PRODUCTS[name] in given and max(given) == low_precision._PRODUCTS[name]


def test_queues_that_an_interrupted_iteration_leaves_are_there() -> None:
    assert broken_iteration.STASH in declared(tree('quantization.py'))
    assert broken_iteration.FIRST in declared(tree('distributed.py'))
    assert 'quantization_state' in {
        node.attr for node in ast.walk(tree('quantization.py')) if isinstance(node, ast.Attribute)
    }
