# SPDX-License-Identifier: Apache-2.0
"""Auxiliary state of an iteration is restored: random numbers, counters, schedule."""

import random
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import num_microbatches_calculator
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel import random as upstream_random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from megatron.moevement.job.megatron_loop import OperationCount
from megatron.moevement.job.megatron_trainer import MegatronAuxiliaryState, MegatronTrainer
from megatron.moevement.state import iteration_state
from megatron.moevement.state.global_scalars import GlobalScalars, ScalarRecorder
from moevement_ext.recover.trainer import Committed
from tests.stand_ins.random_states import GeneratorsTracker

SAMPLES = 24
"""Samples in which the batch grows from 4 to 8 and 12, in micro-batches of 4."""


@pytest.fixture(autouse=True)
def growing_batches() -> Iterator[None]:
    num_microbatches_calculator.init_num_microbatches_calculator(
        0, None, 12, 4, 1, step_batch_size_schedule=f'0:4 12:8 {SAMPLES}:12', seq_length=1
    )
    assert get_num_microbatches() == 1
    yield
    num_microbatches_calculator.unset_num_microbatches_calculator()


@pytest.fixture(params=[CudaRNGStatesTracker, GeneratorsTracker])
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generators of model parallelism besides the default ones.

    Their state is a tensor, or a generator as in Transformer Engine.
    """
    monkeypatch.setattr(upstream_random, '_CUDA_RNG_STATE_TRACKER', request.param())
    monkeypatch.setattr(upstream_random, '_CUDA_RNG_STATE_TRACKER_INITIALIZED', True)
    get_cuda_rng_tracker().add('experts', 5)


class Loop:
    """Counters and schedule of a training loop."""

    def __init__(self) -> None:
        self.counters = Namespace(
            iteration=0,
            curr_iteration=0,
            consumed_train_samples=0,
            consumed_valid_samples=0,
            skipped_train_samples=0,
            num_floating_point_operations_so_far=0.0,
        )
        self.inner = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
        for group in self.inner.param_groups:
            group.update(max_lr=1.0, min_lr=0.1, wd_mult=1.0, lr_mult=1.0)
        self.optimizer = SimpleNamespace(optimizer=self.inner, param_groups=self.inner.param_groups)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=1.0,
            min_lr=0.1,
            lr_warmup_steps=8,
            lr_decay_steps=64,
            lr_decay_style='cosine',
            start_wd=0.1,
            end_wd=0.5,
            wd_incr_steps=64,
            wd_incr_style='linear',
        )

    def train(self, samples: int) -> None:
        """Count an iteration of this many samples."""
        counters = self.counters
        counters.iteration += 1
        counters.curr_iteration = counters.iteration
        counters.consumed_train_samples += samples
        counters.consumed_valid_samples += 2
        counters.skipped_train_samples += 1
        counters.num_floating_point_operations_so_far += 1e9
        get_rerun_state_machine().current_iteration = counters.iteration
        num_microbatches_calculator.update_num_microbatches(
            counters.consumed_train_samples, consistency_check=False
        )
        self.scheduler.step(increment=samples)

    def captured(self) -> bytes:
        counters = self.counters
        state = iteration_state.capture(
            counters,
            counters.iteration,
            self.optimizer,
            self.scheduler,
            GlobalScalars([0.1, 3.0], [True], 7),
            counters.num_floating_point_operations_so_far,
        )
        return iteration_state.encode(state)

    def auxiliary_state(self) -> MegatronAuxiliaryState:
        operations = OperationCount(lambda: 0.0)
        around: Any = SimpleNamespace(recorder=ScalarRecorder(), data=None, operations=operations)
        return MegatronAuxiliaryState(self, self.counters, around)  # type: ignore[arg-type]

    def record(self, iteration: int, skipped: bool) -> Committed:
        trainer: Any = SimpleNamespace(
            _facts=SimpleNamespace(data_parallel_size=1, micro_batch_size=4),
            _recorder=ScalarRecorder(),
            _operations=OperationCount(lambda: 0.0),
            loss=None,
            replicas=SimpleNamespace(rebalances=lambda iteration: False),
            auxiliary_state=self.auxiliary_state(),
        )
        return MegatronTrainer.record(trainer, iteration, skipped)

    def restore(self, state: bytes) -> None:
        decoded = iteration_state.decode(state)
        iteration_state.restore(decoded, self.counters, self.optimizer, self.scheduler)

    def rates(self) -> list[float]:
        (group,) = self.inner.param_groups
        return [group['lr'], group['weight_decay'], self.scheduler.num_steps]


def drawn() -> list[object]:
    """The next numbers of all generators; `gauss` and `randn` buffer every second one."""
    with get_cuda_rng_tracker().fork('experts'):
        of_experts = torch.rand(3).tolist()
    return [
        random.random(),
        random.gauss(),
        np.random.rand(),
        np.random.randn(),
        torch.rand(3).tolist(),
        of_experts,
    ]


def test_new_loop_continues_from_a_captured_one(tracker: None) -> None:
    trained, fresh = Loop(), Loop()
    for samples in (4, 4, 8, 8):
        trained.train(samples)
    state, counted = trained.captured(), Namespace(**vars(trained.counters))
    rates, micro_batches, expected = trained.rates(), get_num_microbatches(), drawn()
    assert micro_batches == 3
    fresh.train(4)
    num_microbatches_calculator.update_num_microbatches(0, consistency_check=False)
    assert get_num_microbatches() == 1
    fresh.restore(state)
    assert fresh.counters == counted
    assert fresh.rates() == rates
    assert get_num_microbatches() == micro_batches
    assert get_rerun_state_machine().current_iteration == counted.iteration
    assert drawn() == expected
    for loop in (trained, fresh):
        loop.train(12)
    assert fresh.rates() == trained.rates()
    fresh.restore(state)
    assert fresh.captured() == state, 'also by all that was not looked at'


def test_new_process_restores_constants_of_a_dense_checkpoint() -> None:
    """Upstream reads them from there, by a flag or without; a new process has flags only."""
    saved, trained, fresh = Loop(), Loop(), Loop()
    saved.scheduler.lr_decay_steps, saved.scheduler.lr_decay_style = 32, 'linear'
    saved.inner.param_groups[0].update(betas=(0.5, 0.75), eps=0.125)
    trained.inner.load_state_dict(saved.inner.state_dict())
    trained.optimizer.param_groups = trained.inner.param_groups  # as upstream's property returns it
    trained.scheduler.use_checkpoint_opt_param_scheduler = True
    trained.scheduler.load_state_dict(saved.scheduler.state_dict())
    trained.train(12)
    fresh.restore(trained.captured())
    assert fresh.inner.param_groups[0]['betas'] == (0.5, 0.75)
    assert fresh.scheduler.state_dict() == trained.scheduler.state_dict()
    for loop in (trained, fresh):
        loop.train(12)
        assert loop.rates() != Loop().rates()
        (weight,) = loop.inner.param_groups[0]['params']
        weight.grad = torch.ones(1)
        loop.inner.step()
    assert fresh.rates() == trained.rates()
    one, other = (loop.inner.param_groups[0]['params'][0] for loop in (trained, fresh))
    assert one.item() == other.item() != 0.0


def test_first_iteration_after_a_dense_load_repeats_its_weight_decay() -> None:
    """Upstream computes it before it takes the schedule of the checkpoint."""
    saved, trained, fresh = Loop(), Loop(), Loop()
    saved.train(4)
    saved.scheduler.start_wd, saved.scheduler.end_wd = 0.01, 0.02
    trained.scheduler.use_checkpoint_opt_param_scheduler = True
    trained.scheduler.load_state_dict(saved.scheduler.state_dict())
    first, state = trained.rates(), trained.captured()
    fresh.restore(state)
    assert fresh.rates() == first
    for loop in (trained, fresh):
        loop.train(4)
    assert fresh.rates() == trained.rates()
    assert fresh.rates()[1] < 0.02 < first[1]
    trained.restore(state)
    assert trained.rates() == first


def test_skipped_update_keeps_the_weight_decay_of_a_dense_load() -> None:
    """The scheduler does not step then, and a survivor goes on as a replaying stage does."""
    loop = Loop()
    loop.scheduler.start_wd = loop.scheduler.end_wd = 0.01
    before = loop.rates()
    loop.restore(loop.record(1, skipped=True).state)
    assert loop.rates() == before
    loop.restore(loop.record(2, skipped=False).state)
    assert loop.rates()[1] == 0.01 < before[1]


def test_skipped_samples_of_a_decreased_batch_are_counted() -> None:
    num_microbatches_calculator.reconfigure_num_microbatches_calculator(
        0, None, 7, 4, 1, decrease_batch_size_if_needed=True
    )
    loop = Loop()
    loop.counters.iteration, loop.counters.skipped_train_samples = 2, 6
    iteration_state.move_to(5, 20, loop.counters)
    assert loop.counters.skipped_train_samples == 15
