# SPDX-License-Identifier: Apache-2.0
"""Loaders that upstream reads again and again go on anywhere, and draw what upstream draws."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler
from megatron.training.training import cyclic_iter
from torch.utils.data import DataLoader

from megatron.moevement.seams.data_position import UpstreamData

SAMPLES = 14
MICRO_BATCH = 2
READ = 20
"""Micro-batches: nearly three epochs of two data-parallel ranks."""


def loader(consumed_samples: int) -> DataLoader:
    sampler = MegatronPretrainingRandomSampler(
        list(range(SAMPLES)), SAMPLES, consumed_samples, MICRO_BATCH, 1, 2, True
    )
    return DataLoader(list(range(SAMPLES)), batch_sampler=sampler)


def read(batches: Iterator[Any], count: int) -> list[tuple[list[int], int]]:
    """Samples of each micro-batch, and a random number that is drawn after it."""
    return [(next(batches).tolist(), int(torch.randint(1 << 30, ()))) for _ in range(count)]


@pytest.mark.parametrize('done', range(READ))
def test_a_loader_goes_on_with_the_samples_and_random_numbers_of_upstreams(done: int) -> None:
    torch.manual_seed(7)
    undisturbed = iter(cyclic_iter(loader(0)))
    read(undisturbed, done)
    state = torch.get_rng_state()
    expected = read(undisturbed, READ - done)

    data = UpstreamData(cyclic=True)
    data._loaders['training'] = [loader]
    moved = RerunDataIterator(iter(()))
    data.use(moved, Namespace())
    torch.set_rng_state(state)
    data.move_training(done * MICRO_BATCH * 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert read(moved.iterable, READ - done) == expected
