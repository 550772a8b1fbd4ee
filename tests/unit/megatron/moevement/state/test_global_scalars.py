# SPDX-License-Identifier: Apache-2.0
"""Overflow flags, loss scales and gradient norms of several optimizers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import optimizer as upstreams
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron.moevement.job.megatron_trainer import MegatronTrainer
from megatron.moevement.job.session import Session
from megatron.moevement.seams import upstream
from megatron.moevement.state import iteration_state
from megatron.moevement.state.global_scalars import GlobalScalars, ScalarRecorder, check_room
from moevement_ext.errors import SparseCheckpointError
from moevement_ext.memory.ledger import MAX_SCALARS


def test_conversion_records_its_iterations_one_by_one() -> None:
    """The records are not taken, and each slot rolls back to the records of its iteration."""
    recorder = ScalarRecorder()
    trainer: Any = SimpleNamespace(_recorder=recorder)
    for norm in (1.0, 2.0, 3.0):
        scalars = GlobalScalars([norm], [False], 7)
        slot = iteration_state.IterationState(
            *(1, 8, 0, 0, 0.0, 8), scalars, iteration_state.capture_rng(), [], []
        )
        with MegatronTrainer.reduced(trainer, iteration_state.encode(slot)):
            assert recorder._grad_norm(lambda: -1.0) == norm
            recorder._overflow(lambda name: True, 'dense')
        assert recorder.peek() == GlobalScalars([norm], [False])
        recorder.roll_back(scalars)


def test_token_count_of_a_cuda_graph_is_read_from_its_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CUDA graph calls no Python, but the per-token loss still divides by the count."""
    recorder, tokens = ScalarRecorder(), torch.tensor(0)
    config = SimpleNamespace(finalize_model_grads_func=lambda model, num_tokens: None)
    recorder.wrap_reduction(config)
    config.finalize_model_grads_func([], torch.tensor(5))
    assert recorder.take().num_tokens == 5
    with monkeypatch.context() as recording:
        recording.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
        config.finalize_model_grads_func([], tokens)
    for number in (7, 9):
        tokens.fill_(number)
        assert recorder.peek().num_tokens == recorder.take().num_tokens == number


# ---- capacity of the ledger for reduced numbers


def chain(optimizers: int, stubs: int = 0) -> ChainedOptimizer:
    """Chained optimizers, each with its own norm group; stubs have no parameters here."""
    config = OptimizerConfig(lr=0.1)
    made = []
    for number in range(optimizers):
        inner = None
        if number >= stubs:
            inner = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
        made.append(FP32Optimizer(inner, config, lambda *_: None))
        made[-1].grad_stats_parallel_group = object()
        made[-1].tp_group = torch.distributed.group.WORLD
    return ChainedOptimizer(made)


def model_config(detached: bool) -> Any:
    return SimpleNamespace(mtp_num_layers=int(detached), mtp_detach_heads=detached)


@pytest.mark.parametrize('detached', [False, True])
def test_check_counts_all_norms_of_an_upstream_step(
    detached: bool, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizers without parameters on this rank take part in the reduction."""
    recorder = ScalarRecorder()
    monkeypatch.setattr(
        upstreams,
        'get_grad_norm_fp32',
        lambda *args, **kwargs: recorder._grad_norm(lambda *_, **__: 1.0, *args, **kwargs),
    )
    most = MAX_SCALARS // (1 + detached)
    optimizer = chain(most, stubs=3)
    upstream.fill_first_step_caches(optimizer, model_config(detached))
    optimizer.step()
    assert len(recorder.take().grad_norms) == most * (1 + detached)
    check_room(optimizer, detached)
    with pytest.raises(SparseCheckpointError, match=f'records {MAX_SCALARS}. Chain {most} optim'):
        check_room(ChainedOptimizer([optimizer, chain(1, stubs=1)]), detached)


@pytest.mark.parametrize(('detached', 'named'), [(False, '^17 chained opt'), (True, 'detach-head')])
def test_too_many_optimizers_are_refused_at_set_up(detached: bool, named: str) -> None:
    model = [torch.nn.Linear(2, 2)]
    model[0].config = model_config(detached)
    engine = SimpleNamespace(
        joining=False,
        rank=SimpleNamespace(exchange=None),
        set_up=lambda build_trainer, *_: build_trainer(False),
    )
    facts = SimpleNamespace(load=None)
    session = Session(engine, facts, SimpleNamespace(train_iters=1), None)
    with pytest.raises(SparseCheckpointError, match=named):
        session.set_up(lambda with_dense: (model, chain(17), None), lambda *_: None, -1)
