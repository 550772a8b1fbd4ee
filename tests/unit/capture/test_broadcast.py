# SPDX-License-Identifier: Apache-2.0
"""Packed broadcasts among real processes."""

import pytest
import torch

from moevement_ext.capture.trainer_state import broadcast_packed
from tests.unit.regroup.ranks import Job, cluster

CPU = torch.device('cpu')
SOURCE = 1


def state_of(rank: int) -> list[torch.Tensor]:
    """Tensors of odd sizes: the ones after the bf16 tensor are not aligned to 4 bytes."""
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(7, generator=generator),
        torch.randn(7, generator=generator).to(torch.bfloat16),
        torch.randn(3, 5, generator=generator),
        torch.zeros(0),
        torch.tensor(float(rank)),
        torch.randint(0, 100, (11,), generator=generator),
        torch.rand(5, generator=generator) > 0.5,
    ]


def count_broadcasts(job: Job, limit: int) -> int:
    """Return the number of broadcasts; fail if this rank lacks the state of the source."""
    tensors, expected = state_of(job.rank), state_of(SOURCE)
    sent = []
    broadcast = torch.distributed.broadcast

    def counted(packed: torch.Tensor, *args: object, **kwargs: object) -> object:
        sent.append(packed.numel())
        return broadcast(packed, *args, **kwargs)  # type: ignore[arg-type]

    torch.distributed.broadcast = counted
    try:
        broadcast_packed(tensors, SOURCE, job.groups['world'], CPU, limit)
    finally:
        torch.distributed.broadcast = broadcast
    assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
    assert max(sent) <= limit
    return len(sent)


@pytest.mark.parametrize(('limit', 'fewest'), [(2**20, 1), (64, 4), (5, 40)])
def test_all_ranks_receive_the_state_of_the_source(limit: int, fewest: int) -> None:
    with cluster(2) as job:
        for count in job.all(count_broadcasts, limit):
            assert fewest <= count <= 2 * fewest
