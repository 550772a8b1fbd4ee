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

from megatron.moevement.seams.patches import TAKING
from megatron.moevement.state import broken_iteration, low_precision

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


def strings(node: ast.AST) -> set[str]:
    constants = (found for found in ast.walk(node) if isinstance(found, ast.Constant))
    return {found.value for found in constants if isinstance(found.value, str)}


# ---- the optimizer

ADAM = 'optimizers/fused_adam.py', 'FusedAdam'


@pytest.mark.parametrize(
    ('method', 'expected'),
    [
        ('_apply_scale', ['self', 'state_name', 'unscaled_state', 'scaled_state', 'scale']),
        ('initialize_state', ['self', 'param', 'store_param_remainders']),
    ],
)
def test_adam_has_the_methods_that_are_overridden_or_called(
    method: str, expected: list[str]
) -> None:
    assert parameters(class_of(*ADAM), method) == expected


def test_adam_accepts_the_arguments_of_wrapped_upstream() -> None:
    assert set(TAKING['megatron.core.optimizer:Adam']) <= set(
        parameters(class_of(*ADAM), '__init__')
    )


@pytest.mark.parametrize('name', ['name_to_dtype_map', 'master_weight_dtype', '_scales'])
def test_adam_has_the_attributes_that_are_read_and_set(name: str) -> None:
    assert name in set(attributes_set(class_of(*ADAM)))


def test_masters_and_moments_have_their_names() -> None:
    assert {'master_param', 'exp_avg', 'exp_avg_sq'} <= strings(class_of(*ADAM))


# ---- layers


@pytest.mark.parametrize(
    ('method', 'expected'),
    [
        ('init_fp8_metadata', ['self', 'num_gemms']),
        ('backward_dw', ['self']),
        (
            'register_wgrad_accumulation_and_reduce_hooks',
            ['self', 'wgrad_accumulation_and_reduce_hook'],
        ),
    ],
)
def test_all_layers_have_these_methods(method: str, expected: list[str]) -> None:
    assert parameters(class_of('module/base.py', 'TransformerEngineBaseModule'), method) == expected


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


def test_delayed_scaling_keeps_these_tensors_by_direction() -> None:
    state = class_of('quantization.py', 'DelayedScalingRecipeState')
    assert set(low_precision._TENSORS) <= set(attributes_set(state)) | {
        node.target.id
        for node in state.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert set(low_precision._DIRECTIONS) <= strings(tree('quantization.py'))


def test_experts_of_a_grouped_layer_have_numbered_parameters() -> None:
    """And the first weight alone is asked whether gradients are wanted (`frozen.py`)."""
    layer = (root() / 'module' / 'grouped_linear.py').read_text('utf-8')
    named = {
        part.value
        for node in ast.walk(ast.parse(layer))
        if isinstance(node, ast.JoinedStr)
        for part in node.values[:1]
        if isinstance(part, ast.Constant)
    }
    assert {'weight', 'bias'} <= named
    assert 'weights[0].requires_grad' in layer


def test_parts_that_an_interrupted_iteration_leaves_are_there() -> None:
    base = class_of('module/base.py', 'TransformerEngineBaseModule')
    operation = class_of('ops/basic/grouped_linear.py', 'GroupedLinear')
    assert all(broken_iteration.QUEUE in set(attributes_set(node)) for node in (base, operation))
    assert 'context' in set(attributes_set(class_of('module/_common.py', 'WeightGradStore')))
    for file, name in (
        ('quantization.py', broken_iteration.STASH),
        ('distributed.py', broken_iteration.FIRST),
    ):
        declared = (node for node in ast.walk(tree(file)) if isinstance(node, ast.AnnAssign))
        assert any(isinstance(one.target, ast.Name) and one.target.id == name for one in declared)
    assert 'quantization_state' in {
        node.attr for node in ast.walk(tree('quantization.py')) if isinstance(node, ast.Attribute)
    }


# ---- tensors


@pytest.mark.parametrize(
    ('file', 'number'),
    [
        ('tensor/storage/float8_tensor_storage.py', 0),
        ('tensor/storage/float8_blockwise_tensor_storage.py', 1),
        ('tensor/storage/mxfp8_tensor_storage.py', 1),
    ],
)
def test_fp8_state_stores_bytes_and_scales_in_these_attributes(file: str, number: int) -> None:
    assert {low_precision._BYTES[number], low_precision._SCALES[number]} <= set(
        attributes_set(tree(file))
    )


def test_quantizers_to_fp8_have_a_settable_scale() -> None:
    quantizer = class_of('tensor/float8_tensor.py', 'Float8Quantizer')
    assert 'scale' in set(attributes_set(quantizer))
    assert '_quantizer' in set(attributes_set(tree('tensor/storage/float8_tensor_storage.py')))
