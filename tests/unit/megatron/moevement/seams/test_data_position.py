# SPDX-License-Identifier: Apache-2.0
"""Upstream's loaders continue from any position and draw the same random numbers."""

import random
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.training.datasets.data_samplers import (
    MegatronFullValidationSampler,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from megatron.training.training import cyclic_iter
from torch.utils.data import DataLoader, Sampler

from megatron.moevement.seams.data_position import UpstreamData
from megatron.moevement.state import iteration_state

SAMPLES = 14
MICRO_BATCH = 2
READ = 20
"""Micro-batches: nearly three rounds of two data-parallel ranks."""


def loader(consumed_samples: int, workers: int = 0) -> DataLoader:
    sampler = MegatronPretrainingRandomSampler(
        list(range(SAMPLES)), SAMPLES, consumed_samples, MICRO_BATCH, 1, 2, True
    )
    return DataLoader(
        list(range(SAMPLES)),
        batch_sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def in_order(ranks: int, dataset: list[int], consumed_samples: int) -> DataLoader:
    sampler = MegatronPretrainingSampler(len(dataset), consumed_samples, 1, 0, ranks)
    return DataLoader(dataset, batch_sampler=sampler)


def read(batches: Iterator[Any], count: int) -> list[tuple[list[int], int]]:
    """Samples of each micro-batch, each with a random number drawn after it."""
    return [(next(batches).tolist(), int(torch.randint(1 << 30, ()))) for _ in range(count)]


@pytest.mark.parametrize(
    ('done', 'workers'), [*((done, 0) for done in range(READ)), *((done, 1) for done in (0, 2, 3))]
)
def test_moved_loader_continues_with_upstreams_samples_and_draws(done: int, workers: int) -> None:
    torch.manual_seed(7)
    undisturbed = iter(cyclic_iter(loader(0, workers)))
    read(undisturbed, done)
    state = torch.get_rng_state()
    expected = read(undisturbed, READ - done)

    data = UpstreamData(cyclic=True, full_validation=False)
    data._loaders['training'] = [partial(loader, workers=workers)]
    moved = RerunDataIterator(iter(()))
    data.use(moved, Namespace())
    torch.set_rng_state(state)
    data.move_training(done * MICRO_BATCH * 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert read(moved.iterable, READ - done) == expected


def test_full_validation_reads_all_samples_after_a_restart() -> None:
    everything = list(range(5))
    sampler = MegatronFullValidationSampler(len(everything), 0, 1)
    loader = DataLoader(everything, batch_sampler=sampler)
    data = UpstreamData(cyclic=False, full_validation=True)
    data._loaders['validation'] = [lambda _: loader]
    batches = RerunDataIterator(iter(cyclic_iter(loader)))  # as upstream opens it
    data.use(Namespace(), batches)
    data.move_validation(10)
    for _ in range(2):
        assert [next(batches).item() for _ in everything] == everything


@pytest.mark.parametrize('sets', [1, 2, 3])
def test_training_loaders_are_found_among_validation_sets(sets: int) -> None:
    """Upstream builds the loaders of each of two model chunks in one call."""
    data = UpstreamData(cyclic=False, full_validation=sets > 1)
    datasets = [list(range(20)), *([list(range(5))] * sets), list(range(7))]

    def build_all(provider: None) -> RerunDataIterator:
        training, *_ = [data._noting(partial(in_order, 1), dataset, 0) for dataset in datasets]
        return RerunDataIterator(iter(training))

    chunks = [data._building(build_all, None) for _ in range(2)]
    data.use(chunks, [Namespace()] * 2)
    data.move_training(16)
    assert [[batch.item() for batch in chunk.iterable] for chunk in chunks] == [
        [16, 17, 18, 19]
    ] * 2


@pytest.mark.parametrize('kind', ['training', 'validation'])
def test_data_can_be_moved_to_the_end(kind: str) -> None:
    """A blend has exactly the samples of training; upstream opens no loader at its end."""
    data = UpstreamData(cyclic=False, full_validation=False)
    dataset = list(range(8))

    for _ in range(2):
        data._noting(partial(in_order, 2), dataset, 0)
    moved = {'training': RerunDataIterator(iter(())), 'validation': RerunDataIterator(iter(()))}
    data.use(moved['training'], moved['validation'])
    for consumed, left in ((8, []), (6, [6]), (8, [])):
        getattr(data, f'move_{kind}')(consumed)
        assert [batch.item() for batch in moved[kind].iterable] == left


class Shuffled(Sampler):
    """Draws from all global generators of the host when opened."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(9).tolist()
        random.shuffle(order)
        np.random.shuffle(order)
        return iter([[index] for index in order])


@pytest.mark.parametrize('kind', ['training', 'validation'])
def test_moving_data_leaves_generators_unchanged(kind: str) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.random(), torch.rand(()).item()

    data = UpstreamData(cyclic=False, full_validation=False)
    data._loaders[kind] = [lambda _: DataLoader(list(range(9)), batch_sampler=Shuffled())]
    moved = {'training': Namespace(), 'validation': Namespace(), kind: RerunDataIterator(iter(()))}
    data.use(moved['training'], moved['validation'])
    before = iteration_state.capture_rng()
    expected = draw()
    iteration_state.restore_rng(before)
    getattr(data, f'move_{kind}')(4)
    assert draw() == expected
    assert len(list(moved[kind].iterable)) == 9
