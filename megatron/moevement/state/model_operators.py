# SPDX-License-Identifier: Apache-2.0
"""The operators of a rank: every expert, every router, and the remaining parameters.

An *operator* (paper section 3.1) is the unit of capture: one expert, one router, the non-expert
rest of a layer, the embedding, or the head (final norm and output layer). Names are equal on all
ranks that hold a part of the operator: `layer3.expert5` counts layers from 1 as upstream does and
experts globally (or their slots, where they have some); `mtp1.expert5` belongs to the first
multi-token prediction layer.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from megatron.core.utils import get_model_config

from megatron.moevement.state.low_precision import scaling_of
from megatron.moevement.state.optimizer_state import ParameterState
from moevement_ext.errors import SparseCheckpointError

_EXPERT = re.compile(
    r'mlp\.experts\.(?:local_experts\.(?P<sequential>\d+)\.|linear_fc[12]\.(?:weight|bias)(?P<grouped>\d+)$)'
)
_HEAD = ('decoder.final_layernorm.', 'decoder.final_norm.', 'output_layer.')


@dataclass
class Operator:
    """One operator of this rank.

    `parameters`, `buffers` and `scaling` (see `scaling.scaling_of`) are keyed by a name that is
    unique on the rank (`chunk0.decoder.layers.1.mlp.router.weight`).
    """

    name: str
    kind: str  # 'expert', 'router' or 'rest'
    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    scaling: dict[str, torch.Tensor] = field(default_factory=dict)
    holds: str = ''
    """What the operator would be called if the expert in this slot had no other copy; '': experts
    have no slots."""


def operator_inventory(model: Sequence[torch.nn.Module]) -> dict[str, Operator]:
    """Assign every parameter and buffer of this rank's model chunks to exactly one operator.

    Returns operators by name, in the order of the forward pass, the head last.
    """
    operators: dict[str, Operator] = {}
    heads: dict[str, Operator] = {}
    for index, chunk in enumerate(model):
        inner = _unwrap(chunk)
        layers = _layers(inner)
        for name, parameter in inner.named_parameters():
            operator = _operator_of(name, layers)
            home = heads if operator.name == 'head' else operators
            home.setdefault(operator.name, operator).parameters[f'chunk{index}.{name}'] = parameter
        for name, buffer in inner.named_buffers():
            operator = _operator_of(name, layers)
            home = heads if operator.name == 'head' else operators
            home.setdefault(operator.name, operator).buffers[f'chunk{index}.{name}'] = buffer
        for name, tensor in scaling_of(inner):
            operator = _owner_of_scaling(name, layers)
            operators.setdefault(operator.name, operator).scaling[f'chunk{index}.{name}'] = tensor
    return {**operators, **heads}


def tied_operators(model: Sequence[torch.nn.Module], operators: dict[str, Operator]) -> list[str]:
    """Operators that share weights with other stages: both ends, or multi-token prediction layers.

    Their gradients are summed across these stages, so the operators must thaw together: the planner
    puts them into slot 0 on all of these stages.
    """
    shared = set()
    if shares_embedding(model):
        shared = {'embedding', 'head'}
    if getattr(get_model_config(model[0]), 'mtp_num_layers', None):
        shared.add('embedding')
    return [name for name in ('embedding', 'head') if name in shared & operators.keys()]


def shares_embedding(model: Sequence[torch.nn.Module]) -> bool:
    """True if embedding and output layer have one weight."""
    return bool(getattr(_unwrap(model[0]), 'share_embeddings_and_output_weights', False))


def router_modules(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    """Pairs (layer name, router module) of all Mixture-of-Experts layers of this rank."""
    for chunk in model:
        for layer in _layers(_unwrap(chunk)).values():
            for module in layer.module.modules():
                if isinstance(module, BaseMoELayer):
                    yield layer.name, module.router


def check_complete(
    operators: dict[str, Operator], states: dict[torch.nn.Parameter, ParameterState]
) -> None:
    """Check that every parameter is trained, and if it has optimizer state, is in one operator.

    Raises:
        SparseCheckpointError: inventory and optimizer disagree, or a parameter does not require a
            gradient.
    """
    owners: dict[int, str] = {}
    for operator in operators.values():
        for name, parameter in operator.parameters.items():
            if id(parameter) in owners:
                raise SparseCheckpointError(
                    f'{name} belongs to {owners[id(parameter)]} and to {operator.name}; '
                    'sparse checkpointing needs exactly one operator for each parameter.'
                )
            owners[id(parameter)] = operator.name
            if not parameter.requires_grad:  # a replay uses this attribute to freeze
                raise SparseCheckpointError(
                    f'{name} has requires_grad=False; sparse checkpointing does not support '
                    'untrained parameters. Train all of them, or train without --sparse-ckpt.'
                )
    lost = [state.name for state in states.values() if id(state.parameter) not in owners]
    if lost:
        raise SparseCheckpointError(
            f'The optimizer holds state for parameters that no operator owns: {lost[:5]}. '
            'Sparse checkpointing does not support this model; train without --sparse-ckpt.'
        )


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    while hasattr(module, 'module'):
        module = module.module  # type: ignore[assignment]
    return module


class _Layer(NamedTuple):
    name: str  # 'layer3', or 'mtp1' for multi-token prediction layers, which have their own count
    module: torch.nn.Module


def _layers(inner: torch.nn.Module) -> dict[str, _Layer]:
    """Transformer layers by module path."""
    blocks = {'decoder.layers.': 'layer', 'mtp.layers.': 'mtp'}
    return {
        f'{path}.': _Layer(f'{kind}{module.layer_number}', module)
        for path, module in inner.named_modules()
        for block, kind in blocks.items()
        if isinstance(module, BaseTransformerLayer) and path.startswith(block)
    }


def _operator_of(name: str, layers: dict[str, _Layer]) -> Operator:
    for path, layer in layers.items():
        if name.startswith(path):
            return _operator_in_layer(name, layer)
    if name.startswith(_HEAD):
        return Operator('head', 'rest')
    return Operator('embedding' if name.startswith('embedding.') else 'others', 'rest')


def _owner_of_scaling(name: str, layers: dict[str, _Layer]) -> Operator:
    """Operator of a scaling state. Experts computed together share one, which goes to the rest."""
    operator = _operator_of(name, layers)
    layer, _, shared = operator.name.rpartition('.experts')
    return Operator(f'{layer}.rest', 'rest') if layer and not shared else operator


def _operator_in_layer(name: str, layer: _Layer) -> Operator:
    prefix = layer.name
    if '.mlp.router.' in name:
        return Operator(f'{prefix}.router', 'router')
    match = _EXPERT.search(name)
    if match:
        local = int(match['sequential'] or match['grouped'])
        mlp: Any = layer.module.mlp
        number = mlp.local_expert_indices[local]
        placement = getattr(mlp.router, 'placement', None)
        expert = None if placement is None else int(placement.flatten()[number])
        holds = '' if expert is None else f'{prefix}.expert{expert}'
        return Operator(f'{prefix}.expert{number}', 'expert', holds=holds)
    if '.mlp.experts.' in name:
        return Operator(f'{prefix}.experts', 'expert')  # one tensor for all local experts
    return Operator(f'{prefix}.rest', 'rest')


def num_experts(model: Sequence[torch.nn.Module]) -> int:
    """Experts per Mixture-of-Experts layer, over all ranks."""
    return get_model_config(model[0]).num_moe_experts or 0
