# SPDX-License-Identifier: Apache-2.0
"""Operators of a model: complete, and unlike those of a slot of another model."""

from types import SimpleNamespace

import msgspec
import pytest
import torch

from megatron.moevement.state import model_operators
from megatron.moevement.state.model_operators import Operator, check_complete
from moevement_ext.capture.layout import OperatorSlices, SlotLayout, TensorSlice, check_fits
from moevement_ext.errors import SparseCheckpointError
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.slot import FORMAT_VERSION, SlotContext, SlotHeader
from moevement_ext.plan.byte_planner import WindowPlan

Model = dict[str, OperatorSlices]


def _operator(name: str, numel: int = 6, dtype: torch.dtype = torch.bfloat16) -> OperatorSlices:
    master, weight = torch.zeros(numel), torch.zeros(numel, dtype=dtype)
    return OperatorSlices(
        (TensorSlice(name, f'{name}.weight', 'master', 0, numel, master),),
        (TensorSlice(name, f'{name}.weight', 'weight', 0, numel, weight),),
    )


def _model(**changed: OperatorSlices) -> Model:
    return {'expert0': _operator('expert0'), 'rest': _operator('rest')} | changed


def _scaled(name: str, length: int = 4) -> OperatorSlices:
    history = TensorSlice(name, f'{name}.amax_history', 'scaling', 0, length, torch.zeros(length))
    return _operator(name)._replace(always=(history,))


def _slot(model: Model, index: int = 0) -> SlotHeader:
    names = list(model)
    layout = SlotLayout(WindowPlan((tuple(names[:1]), tuple(names[1:]))), index, model)
    context = SlotContext(list(layout.full), list(layout.weights), b'')
    return SlotHeader(
        version=FORMAT_VERSION,
        run='0' * 16,
        topology='0' * 16,
        owner=0,
        start=4,
        window=2,
        slot=index,
        iteration=4 + index,
        plan='0' * 16,
        payload_bytes=layout.payload_bytes,
        records=layout.records,
        context=msgspec.msgpack.encode(context),
    )


@pytest.mark.parametrize('index', [0, 1])
def test_slot_of_the_same_model_is_accepted(index: int) -> None:
    check_fits(_slot(_model(), index), _model())


@pytest.mark.parametrize(
    ('captured', 'named'),
    [
        (_model(rest=_operator('rest', numel=8)), 'rest.weight'),
        (_model(rest=_operator('rest', dtype=torch.float16)), 'rest.weight'),
        ({'expert0': _operator('expert0')}, 'no record of rest'),
        (_model(rest=OperatorSlices((), ())), 'rest.weight'),
        (_model(expert0=_scaled('expert0')), 'expert0.amax_history'),
    ],
    ids=['shape', 'type', 'operator', 'parameter', 'scaling'],
)
def test_slot_of_another_model_is_refused_by_parameter(captured: Model, named: str) -> None:
    with pytest.raises(RefusedWindow, match=named):
        check_fits(_slot(captured), _model())


@pytest.mark.parametrize('index', [0, 1])
def test_slot_without_the_scaling_of_any_operator_is_refused(index: int) -> None:
    """Including an operator that an earlier slot of the window has in full."""
    model = _model(expert0=_scaled('expert0'))
    check_fits(_slot(model, index), model)
    with pytest.raises(RefusedWindow, match='no expert0.amax_history'):
        check_fits(_slot(_model(), index), model)
    with pytest.raises(RefusedWindow, match='expert0.amax_history'):
        check_fits(_slot(_model(expert0=_scaled('expert0', length=8)), index), model)


def test_parameter_frozen_by_the_user_is_refused() -> None:
    """A replay would thaw it."""
    weights = {name: torch.nn.Parameter(torch.ones(2)) for name in ('first', 'second')}
    operators = {'layer1.rest': Operator('layer1.rest', 'rest', weights)}
    check_complete(operators, {})
    weights['second'].requires_grad_(False)
    with pytest.raises(SparseCheckpointError, match='^second has requires_grad=False'):
        check_complete(operators, {})


@pytest.mark.parametrize(
    ('path', 'owner'),
    [
        ('self_attention.linear_qkv', 'layer2.rest'),
        ('mlp.experts.local_experts.1.linear_fc1', 'layer2.expert5'),
        ('mlp.experts.linear_fc1', 'layer2.rest'),
    ],
)
def test_scaling_shared_by_experts_belongs_to_the_rest(path: str, owner: str) -> None:
    mlp = SimpleNamespace(local_expert_indices=[4, 5], router=None)
    layers = {'decoder.layers.1.': model_operators._Layer('layer2', SimpleNamespace(mlp=mlp))}
    name = f'decoder.layers.1.{path}.scaling_fwd.scale'
    assert model_operators._owner_of_scaling(name, layers).name == owner
