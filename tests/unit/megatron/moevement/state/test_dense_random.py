# SPDX-License-Identifier: Apache-2.0
"""A dense checkpoint restores all generators of a rank, and only from its own file."""

import dataclasses
import functools
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.training import async_utils, checkpointing

from megatron.moevement.state import dense_random
from megatron.moevement.state.dense_random import DenseRandom
from megatron.moevement.state.iteration_state import capture_rng
from tests.unit.megatron.moevement.seams.test_post_step import FACTS

EXPERTS = 'expert-parallel-rng'


@pytest.fixture(autouse=True)
def generators(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Generators of a rank that has built its model and is not a first rank."""
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(EXPERTS, 7)
    monkeypatch.setattr(dense_random, '_shares_experts', lambda: False)
    yield
    tracker.reset()


def on_rank(rank: int, directory: Path, topology: str = 'pp1', **flags: Any) -> DenseRandom:
    settings = dict.fromkeys(('no_save_rng', 'no_load_rng', 'finetune'), False) | flags
    settings['moe_router_force_load_balancing'] = True
    known = {name: value for name, value in flags.items() if hasattr(FACTS, name)}
    place = {'save': str(directory), 'load': str(directory), 'rank': rank}
    return DenseRandom(dataclasses.replace(FACTS, **(place | known)), settings, topology)


def upstream_saves(directory: Path, content: str = 'settings') -> Callable[..., None]:
    def save(iteration: int, *args: Any, **kwargs: Any) -> None:
        within = directory / 'non_persistent' if kwargs['non_persistent_ckpt'] else directory
        folder = within / f'iter_{iteration:07d}'
        folder.mkdir(parents=True, exist_ok=True)
        (folder / '.metadata').write_text(content)
        draw()

    return save


def upstream_saves_later(directory: Path) -> tuple[Callable[..., None], AsyncCallsQueue]:
    """An asynchronous save, and the queue that finalizes it."""
    queue = AsyncCallsQueue()
    save_now = upstream_saves(directory)

    def save(iteration: int, *args: Any, **kwargs: Any) -> None:
        draw()
        finalize = functools.partial(save_now, iteration, **kwargs)
        checkpointing.schedule_async_save(AsyncRequest(None, (), [finalize]))

    return save, queue


def upstream_loads(*args: Any, **kwargs: Any) -> tuple[int, float]:
    """Load as upstream does: the generators are not those of this rank."""
    draw()
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(EXPERTS, 99)
    return 6, 0.0


def draw() -> None:
    random.random()
    np.random.rand()
    torch.rand(1)
    with get_cuda_rng_tracker().fork(EXPERTS):
        torch.rand(1)


def state() -> bytes:
    return msgspec.msgpack.encode(capture_rng())


@pytest.mark.parametrize('not_kept', [False, True])
def test_every_generator_is_restored(not_kept: bool, tmp_path: Path) -> None:
    draw()
    wanted = state()
    for rank in (0, 1):
        if rank:
            draw()
            wanted = state()
        on_rank(rank, tmp_path).save(upstream_saves(tmp_path), 6, non_persistent_ckpt=not_kept)
    draw()
    assert on_rank(1, tmp_path).load(upstream_loads) == (6, 0.0)
    assert state() == wanted


def test_generators_of_an_asynchronous_save_are_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: object
) -> None:
    save, queue = upstream_saves_later(tmp_path)
    monkeypatch.setattr(async_utils, '_async_calls_queue', queue)
    draw()
    wanted = state()
    on_rank(1, tmp_path).save(save, 6)
    draw()
    queue.maybe_finalize_async_calls(blocking=True)
    on_rank(1, tmp_path).load(upstream_loads)
    assert state() == wanted


def _of_another_rank(directory: Path) -> DenseRandom:
    return on_rank(2, directory)


def _of_another_layout(directory: Path) -> DenseRandom:
    return on_rank(1, directory, topology='pp2')


def _saved_over(directory: Path) -> DenseRandom:
    """Plain Megatron has overwritten the checkpoint in the same folder."""
    upstream_saves(directory, 'other settings')(6, non_persistent_ckpt=False)
    return on_rank(1, directory)


def _damaged(directory: Path) -> DenseRandom:
    (path,) = directory.glob('iter_*/moevement/random-00001')
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return on_rank(1, directory)


def _lost(directory: Path) -> DenseRandom:
    shutil.rmtree(directory / 'iter_0000006' / 'moevement')
    return on_rank(0, directory)


@pytest.mark.parametrize(
    'how', [_of_another_rank, _of_another_layout, _saved_over, _damaged, _lost]
)
def test_foreign_or_damaged_file_is_ignored_with_a_warning(
    how: Callable[[Path], DenseRandom], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = get_cuda_rng_tracker().get_states()[EXPERTS].clone()
    draw()
    on_rank(1, tmp_path).save(upstream_saves(tmp_path), 6)
    loader = how(tmp_path)
    tracker = get_cuda_rng_tracker()
    tracker.set_states({EXPERTS: made})
    with caplog.at_level(logging.WARNING):
        loader.load(upstream_loads)
    assert '--moe-router-force-load-balancing experts draw again' in caplog.text
    assert torch.equal(tracker.get_states()[EXPERTS], made), 'as when the model was made'


def test_first_rank_takes_its_generators_from_upstream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_random, '_shares_experts', lambda: True)
    on_rank(0, tmp_path).load(upstream_loads)
    torch.manual_seed(99)
    assert torch.equal(get_cuda_rng_tracker().get_states()[EXPERTS], torch.get_rng_state())


@pytest.mark.parametrize('flag', ['finetune', 'no_load_rng'])
def test_flags_without_random_state_skip_the_restore(flag: str, tmp_path: Path) -> None:
    on_rank(1, tmp_path).save(upstream_saves(tmp_path), 6)
    wanted = state()
    on_rank(1, tmp_path, **{flag: True}).load(lambda: (6, 0.0))
    assert state() == wanted


@pytest.mark.parametrize(
    'flags',
    [{'no_save_rng': True}, {'non_persistent_ckpt_type': 'local'}, {'save': 'msc://bucket'}],
)
def test_nothing_is_written_for_unsupported_targets(flags: dict, tmp_path: Path) -> None:
    rank = on_rank(1, tmp_path, **flags)
    not_kept = 'non_persistent_ckpt_type' in flags
    rank.save(upstream_saves(tmp_path), 6, non_persistent_ckpt=not_kept)
    assert not list(tmp_path.rglob('moevement')) and not Path('msc:').exists()


def test_failed_write_causes_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save(*args: Any, **kwargs: Any) -> str:
        upstream_saves(tmp_path)(*args, **kwargs)
        (tmp_path / 'iter_0000006' / 'moevement').write_text('no folder')
        return 'saved'

    assert on_rank(1, tmp_path).save(save, 6) == 'saved'
    assert 'random numbers of rank 1 are not kept' in caplog.text
