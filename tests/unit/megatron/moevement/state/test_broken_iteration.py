# SPDX-License-Identifier: Apache-2.0
"""State that an interrupted iteration accumulates into is rolled back."""

from collections.abc import Iterator

import pytest
import torch

from megatron.moevement.seams import cpu_device

cpu_device.install()

from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker  # noqa: E402

from megatron.moevement.state.broken_iteration import BrokenIteration  # noqa: E402
from megatron.moevement.state.model_operators import Operator  # noqa: E402
from moevement_ext.errors import SparseCheckpointError  # noqa: E402


@pytest.fixture
def losses() -> Iterator[torch.Tensor]:
    """The loss that upstream has accumulated, by layer."""
    tracker = get_moe_metrics_tracker()
    tracker.metrics.clear()
    tracker.record('load_balancing_loss', torch.tensor(3.0), layer_number=1, num_layers=2)
    yield tracker.metrics['load_balancing_loss'].values
    tracker.metrics.clear()


def test_buffers_of_all_dtypes_and_metrics_are_rolled_back(losses: torch.Tensor) -> None:
    buffers = {
        'bias': torch.tensor([0.5, -0.0]),
        'counts': torch.tensor([7, 8, 9]),
        'half': torch.ones(3, dtype=torch.bfloat16),
    }
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    broken = BrokenIteration([], {'router': Operator('router', 'router', {}, buffers)})
    for _ in range(2):
        broken.begin()
        for tensor in (*buffers.values(), losses):
            tensor.add_(1)
        broken.roll_back()
        assert losses.tolist() == [3.0, 0.0]
        assert all(torch.equal(buffers[name], before[name]) for name in buffers)


def test_renamed_attribute_of_a_bucket_group_is_refused_at_the_start() -> None:
    class Group:
        param_gather_handle = grad_reduce_handle = None

    class Chunk(torch.nn.Module):
        bucket_groups = (Group(),)
        expert_parallel_bucket_groups = ()

    with pytest.raises(SparseCheckpointError, match='Group.* has no param_gather_dispatched'):
        BrokenIteration([Chunk()], {})
