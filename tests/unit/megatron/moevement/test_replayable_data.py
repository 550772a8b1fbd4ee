# SPDX-License-Identifier: Apache-2.0
"""Moving the data of a custom loop leaves the random numbers of training unchanged."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel import random as upstream_random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch.utils.data import DataLoader

from megatron.moevement.attachment import ReplayableData
from megatron.moevement.seams import cpu_device
from megatron.moevement.state.iteration_state import capture_rng

SAMPLES = 100


@pytest.fixture(autouse=True)
def tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's tracker with one generator."""
    monkeypatch.setattr(upstream_random, '_CUDA_RNG_STATE_TRACKER', CudaRNGStatesTracker())
    monkeypatch.setattr(upstream_random, '_CUDA_RNG_STATE_TRACKER_INITIALIZED', True)
    cpu_device.patch_upstream()
    get_cuda_rng_tracker().add('model-parallel-rng', 5)


def drawn() -> list[float]:
    with get_cuda_rng_tracker().fork():
        of_tracker = torch.rand(1).item()
    return [random.random(), np.random.rand(), torch.rand(1).item(), of_tracker]


def draws_when_made(consumed_samples: int) -> Iterator[Any]:
    random.shuffle(list(range(SAMPLES)))
    drawn()
    return iter(range(consumed_samples, SAMPLES))


def fails(consumed_samples: int) -> Iterator[Any]:
    drawn()
    raise OSError('the file server is away')


def opened_when_read(consumed_samples: int) -> Iterator[Any]:
    """A generator that opens its loader, which draws a seed, only when it is read."""
    yield from DataLoader(range(SAMPLES), sampler=range(consumed_samples, SAMPLES))


def test_making_an_iterator_leaves_generators_unchanged() -> None:
    """Also if that fails."""
    data, before = ReplayableData(), capture_rng()
    data.use(draws_when_made, 0)
    assert capture_rng() == before
    data.move_training(7)
    assert capture_rng() == before
    assert next(data.training) == 7
    with pytest.raises(OSError, match='file server'):
        ReplayableData().use(fails, 0)
    assert capture_rng() == before


def opened_in_each_round(consumed_samples: int) -> Iterator[Any]:
    """A new loader for each round of four samples."""
    while True:
        for sample in DataLoader(range(4), sampler=range(consumed_samples % 4, 4)):
            yield consumed_samples - consumed_samples % 4 + sample
        consumed_samples += 4 - consumed_samples % 4


@pytest.mark.parametrize('make', [opened_when_read, opened_in_each_round])
def test_opening_a_loader_in_an_iteration_leaves_generators_unchanged(
    make: Callable[[int], Iterator[Any]],
) -> None:
    data = ReplayableData()
    data.use(make, 0)
    undisturbed = [iteration(data) for _ in range(5)]
    assert undisturbed[4][0] == 4
    before_last = undisturbed[3][2]
    torch.set_rng_state(before_last)
    data.move_training(4)
    again = iteration(data)
    assert again[:2] == undisturbed[4][:2]
    assert torch.equal(again[2], undisturbed[4][2])


def iteration(data: ReplayableData) -> tuple[int, float, torch.Tensor]:
    """The sample read, a number drawn by a layer, and the random state afterwards."""
    with data.reading():
        sample = int(next(data.training))
        return sample, torch.rand(1).item(), torch.get_rng_state()


def test_draws_of_the_data_change_the_generators() -> None:
    """For example, numbers that data draw with each sample."""
    data = ReplayableData()

    def draw(consumed_samples: int) -> Iterator[float]:
        while True:
            yield torch.rand(1).item()

    data.use(draw, 0)
    read = []
    for _ in range(3):
        with data.reading():
            read.append(next(data.training))
    assert len(set(read)) == 3


def test_loader_opened_by_another_thread_restores_no_generator() -> None:
    """Concurrent draws of training must stay drawn."""
    data = ReplayableData()
    data.use(opened_when_read, 0)
    with data.reading():
        before = torch.get_rng_state()
        thread = threading.Thread(target=lambda: iter(DataLoader(range(3))))
        thread.start()
        thread.join()
        assert not torch.equal(torch.get_rng_state(), before)
