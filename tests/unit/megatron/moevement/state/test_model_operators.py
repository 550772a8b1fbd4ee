# SPDX-License-Identifier: Apache-2.0
"""Each parameter is trained and belongs to one operator, as does the state of its scales."""

from types import SimpleNamespace

import pytest
import torch

from megatron.moevement.state import model_operators
from megatron.moevement.state.model_operators import Operator, check_complete
from moevement_ext.errors import SparseCheckpointError


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
    mlp = SimpleNamespace(local_expert_indices=[4, 5])
    layers = {'decoder.layers.1.': model_operators._Layer('layer2', SimpleNamespace(mlp=mlp))}
    name = f'decoder.layers.1.{path}.scaling_fwd.scale'
    assert model_operators._owner_of_scaling(name, layers).name == owner
