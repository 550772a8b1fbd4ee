# SPDX-License-Identifier: Apache-2.0
"""Each parameter is trained and belongs to one operator."""

import pytest
import torch

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
