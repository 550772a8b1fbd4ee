# SPDX-License-Identifier: Apache-2.0
"""Upstream's modules are imported for a CPU."""

from collections.abc import Iterator

import pytest
import torch

from megatron.moevement.seams import cpu_device

cpu_device.install()


@pytest.fixture
def one_rank() -> Iterator[torch.distributed.ProcessGroup]:
    """The process group of a job of one rank, which upstream asks for."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()
