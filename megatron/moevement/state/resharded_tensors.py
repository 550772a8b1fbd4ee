# SPDX-License-Identifier: Apache-2.0
"""Tensors in another layout: their names in the whole model, and the division of experts.

In a window a tensor has the name that it has on its rank, with numbers of that rank: the model
chunk, the layer within the chunk, the expert within the rank. Its operator counts layers and
experts over the whole model, so that both together give the name in the whole model:
`layer3.expert5` and `chunk1.decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight` give
`decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight`.

Expert tensor parallelism divides the weights of experts: the first layer is divided by rows, a
gated unit's two halves each; the second by columns. Biases of the first layer go with its rows,
those of the second are whole on each rank.
"""

import re
from collections.abc import Mapping

from megatron.moevement.state.model_operators import Operator
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.recover.reshard.index import Division

_EXPERT = re.compile(r'^(.+)\.expert\d+$')
_WEIGHT = re.compile(r'\.(linear_fc[12]\.(?:weight|bias))\d*$')
_OF_A_SHARD = re.compile(r'^(?:scale.*|scaling|weight_scale)$')
_OF_ALL = 'step'

EMBEDDING = 'embedding.word_embeddings.weight'
OUTPUT = 'output_layer.weight'

_CHUNK = re.compile(r'^chunk\d+\.')
_OPERATOR = re.compile(r'^(?:layer|mtp)(\d+)\.(?:expert(\d+)$)?')
_LAYER = re.compile(r'^((?:decoder|mtp)\.layers)\.\d+\.')
_LOCAL_EXPERT = re.compile(
    r'(\.mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))\d+'
)


def canonical_name(operator: str, tensor: str, shared: bool) -> str:
    """Name of a tensor in the whole model.

    `operator` and `tensor` are as in a record. `shared`: embedding and output layer share their
    weight, of which the last stage has a copy.
    """
    name = _CHUNK.sub('', tensor)
    found = _OPERATOR.match(operator)
    if found is not None:
        layer, expert = found.groups()
        name = _LAYER.sub(rf'\g<1>.{int(layer) - 1}.', name)
        if expert is not None:
            name = _LOCAL_EXPERT.sub(rf'\g<1>{expert}', name)
    return EMBEDDING if shared and name == OUTPUT else name


def is_of_an_expert(operator: str) -> bool:
    """True for an operator that expert tensor parallelism divides."""
    return _EXPERT.match(operator) is not None


def refuse_scale(operator: str, part: str, tensor: str) -> None:
    """Raise `RefusedWindow` for a part of an expert that cannot be divided or joined."""
    if is_of_an_expert(operator) and _OF_A_SHARD.match(part):
        raise RefusedWindow(
            f'{tensor} has a scale for each shard ({part}): start with the '
            '--expert-tensor-parallel-size of the windows'
        )


class ExpertDivision:
    """Divisions of the experts' tensors on this rank, in its layout and in others.

    `shards` is the expert tensor parallel size; `gated`: the first layer has a gate.
    """

    def __init__(self, operators: Mapping[str, Operator], shards: int, gated: bool) -> None:
        self._blocks: dict[tuple[str, str], int] = {}
        for operator in operators.values():
            for tensor, parameter in operator.parameters.items():
                place = _place(operator.name, tensor)
                if place is not None:
                    block = _block(place[1], list(parameter.shape), 2 if gated else 1)
                    self._blocks[place] = block * shards

    def of(self, operator: str, part: str, tensor: str, shards: int, shard: int) -> Division:
        """Location of `shard` of `shards`; the whole tensor if no operator of this rank needs it.

        Raises:
            RefusedWindow: the part cannot be divided or joined.
        """
        place = _place(operator, tensor)
        block = 0 if place is None else self._blocks.get(place, 0)
        refuse_scale(operator, part, tensor)
        if not block or part == _OF_ALL:
            return Division()
        return Division(block // shards, shards, shard)


def _place(operator: str, tensor: str) -> tuple[str, str] | None:
    """Layer and kind of a tensor of an expert."""
    layer, weight = _EXPERT.match(operator), _WEIGHT.search(tensor)
    return (layer[1], weight[1]) if layer and weight else None


def _block(kind: str, shape: list[int], halves: int) -> int:
    """Elements of a block of a shard; 0: it is not divided."""
    if kind == 'linear_fc2.bias':
        return 0
    if kind == 'linear_fc2.weight':
        return shape[1]
    numel = 1
    for size in shape:
        numel *= size
    return numel // halves
