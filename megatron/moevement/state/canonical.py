# SPDX-License-Identifier: Apache-2.0
"""Names of tensors that are equal in every layout of a model.

In a window a tensor has the name that it has on its rank, with numbers of that rank: the model
chunk, the layer within the chunk, the expert within the rank. Its operator counts layers and
experts over the whole model, so that both together give the name in the whole model:
`layer3.expert5` and `chunk1.decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight` give
`decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight`.
"""

import re

EMBEDDING = 'embedding.word_embeddings.weight'
OUTPUT = 'output_layer.weight'

_CHUNK = re.compile(r'^chunk\d+\.')
_OPERATOR = re.compile(r'^(?:layer|mtp)(\d+)\.(?:expert(\d+)$)?')
_LAYER = re.compile(r'^((?:decoder|mtp)\.layers)\.\d+\.')
_EXPERT = re.compile(r'(\.mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))\d+')


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
            name = _EXPERT.sub(rf'\g<1>{expert}', name)
    return EMBEDDING if shared and name == OUTPUT else name
