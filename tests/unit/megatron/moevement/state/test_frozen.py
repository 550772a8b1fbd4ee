# SPDX-License-Identifier: Apache-2.0
"""Parameters that require a gradient while operators are frozen."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer import TransformerConfig
from torch.distributed import HashStore, ProcessGroupGloo

from megatron.moevement.seams import patches
from megatron.moevement.state.frozen import FrozenOperators
from megatron.moevement.state.model_operators import Operator
from megatron.moevement.state.optimizer_state import ParameterState

EXPERTS = 'chunk0.decoder.layers.0.mlp.experts'


def experts(*names: str) -> dict[str, Operator]:
    """Two experts, each with one parameter of the given names."""
    return {
        f'layer1.expert{number}': Operator(
            f'layer1.expert{number}', 'expert', {name: torch.nn.Parameter(torch.ones(2))}
        )
        for number, name in enumerate(names)
    }


def active(operators: dict[str, Operator], *frozen: str) -> list[bool]:
    """Whether each expert requires a gradient."""
    FrozenOperators(operators, {}, [], None).freeze(frozen)
    return [
        parameter.requires_grad
        for operator in operators.values()
        for parameter in operator.parameters.values()
    ]


def test_experts_of_a_grouped_layer_thaw_together() -> None:
    """The layer checks its first weight only, and computes all gradients or none."""
    grouped = experts(f'{EXPERTS}.linear_fc1.weight0', f'{EXPERTS}.linear_fc1.weight1')
    assert active(grouped, 'layer1.expert0') == [True, True]
    assert active(grouped, 'layer1.expert1') == [True, True]
    assert active(grouped, *grouped) == [False, False]
    assert active(grouped) == [True, True]


def test_experts_with_separate_layers_are_frozen_individually() -> None:
    single = experts(
        f'{EXPERTS}.local_experts.0.linear_fc1.weight',
        f'{EXPERTS}.local_experts.1.linear_fc1.weight',
    )
    assert active(single, 'layer1.expert0') == [False, True]
    assert active(single) == [True, True]


def test_frozen_operators_have_no_gradient_at_the_update() -> None:
    """Neither `grad` nor the decoupled gradient of a 16-bit weight."""
    weights = {name: torch.nn.Parameter(torch.ones(2)) for name in ('rest', 'expert')}
    states = {
        weight: ParameterState(name, weight, weight, None, 0, range(2), None)
        for name, weight in weights.items()
    }
    operators = {name: Operator(name, 'rest', {name: weight}) for name, weight in weights.items()}

    class Upstream:
        def prepare_grads(self) -> bool:
            for weight in weights.values():
                weight.grad, weight.decoupled_grad = torch.ones(2), torch.ones(2)
            return False

    upstream = Upstream()
    frozen = FrozenOperators(operators, states, [], None)
    frozen.freeze(['expert'])
    undo = patches.wrap_object(upstream, 'prepare_grads', frozen._prepare_active)
    upstream.prepare_grads()
    found = {name: (one.grad, one.decoupled_grad) for name, one in weights.items()}
    assert found['expert'] == (None, None)
    assert all(gradient is not None for gradient in found['rest'])
    undo()
    assert not vars(upstream)


@pytest.mark.parametrize('kind', ['grad', 'decoupled_grad'])
def test_clipping_skips_a_fully_frozen_optimizer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of Transformer Engine and Apex fail on an empty list."""

    def scale(chunk: int, overflow: Any, lists: list[list[torch.Tensor]], factor: float) -> None:
        assert lists[0], 'tensor_lists[0].size() is not > 0'
        for tensor in lists[0]:
            tensor.mul_(factor)

    def clip(*weights: torch.Tensor) -> None:
        optimizer.clip_grad_by_total_norm_fp32(
            list(weights), 1.0, 4.0, use_decoupled_grad=kind == 'decoupled_grad'
        )

    monkeypatch.setattr(clip_grads, 'multi_tensor_scale_impl', scale)
    frozen, active, alone = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    for weight in (active, alone):
        setattr(weight, kind, torch.full((2,), 8.0))
    clip(alone)
    chunk = torch.nn.Identity()
    chunk.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    chunk.ddp_config = SimpleNamespace(overlap_grad_reduce=False, overlap_param_gather=False)
    with FrozenOperators({}, {}, [chunk], ChainedOptimizer([])).replaying():
        clip(frozen)
        clip(frozen, active)
    assert torch.equal(getattr(active, kind), getattr(alone, kind))
    assert getattr(active, kind)[0] < 8.0
    with pytest.raises(AssertionError, match='is not > 0'):
        clip(frozen)


@pytest.fixture
def initialized(one_rank: object) -> Iterator[None]:
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.usefixtures('initialized')
def test_loop_with_overlapped_parameter_gather_is_replayed() -> None:
    """Upstream's trainer has no such hooks in its first iteration, which includes a replay."""
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
    layer = torch.nn.Linear(8, 8)
    chunk = DistributedDataParallel(config, ddp, torch.nn.Sequential(layer))
    hooks = len(chunk.remove_forward_pre_hook_handles)
    assert hooks == 2
    operators = {'rest': Operator('rest', 'rest', dict(layer.named_parameters()))}
    replay = FrozenOperators(operators, {}, [chunk], ChainedOptimizer([]))
    tokens = torch.ones(1, 8, requires_grad=True)
    with replay.replaying():
        replay.freeze(operators)
        chunk(tokens).sum().backward()
    assert tokens.grad is not None and not layer.weight.main_grad.any()
    assert len(chunk.remove_forward_pre_hook_handles) == hooks
    chunk(tokens).sum().backward()
    assert layer.weight.main_grad.any()


TENSOR_PARALLEL = 4
NORMS = {'layer1.rest': 700, 'layer2.rest': 900}
"""Elements of the norms of each layer."""


def summed_by_upstream(config: TransformerConfig, chunks: list[torch.nn.Module]) -> None:
    """Sums over tensor-parallel ranks; each rank is a thread with one of the chunks."""
    store = HashStore()

    def reduce(rank: int) -> None:
        group = ProcessGroupGloo(store, rank, TENSOR_PARALLEL, timedelta(minutes=2))
        _allreduce_non_tensor_model_parallel_grads([chunks[rank]], config, group)

    with ThreadPoolExecutor(TENSOR_PARALLEL) as ranks:
        list(ranks.map(reduce, range(TENSOR_PARALLEL)))


def gradients_of_norms(*frozen: str) -> dict[str, torch.Tensor]:
    """Reduced gradients of norms on four tensor-parallel ranks, with some frozen."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=4,
        sequence_parallel=True,
        tensor_model_parallel_size=TENSOR_PARALLEL,
    )
    generator = torch.Generator().manual_seed(7)
    chunks, operators = [], {name: Operator(name, 'rest') for name in NORMS}
    for rank in range(TENSOR_PARALLEL):
        chunk = torch.nn.ParameterDict()
        chunk.config = config
        chunk.ddp_config = SimpleNamespace(
            overlap_grad_reduce=False, overlap_param_gather=False, use_megatron_fsdp=False
        )
        for name, elements in NORMS.items():
            norm = torch.nn.Parameter(torch.ones(elements))
            norm.sequence_parallel = True
            gradient = torch.randn(elements, generator=generator)
            norm.main_grad = torch.zeros(elements) if name in frozen else gradient
            chunk[name.replace('.', '_')] = norm
            operators[name].parameters[f'rank{rank}.{name}'] = norm
        chunks.append(chunk)
    config.finalize_model_grads_func = partial(summed_by_upstream, config)
    replay = FrozenOperators(operators, {}, chunks, ChainedOptimizer([]))
    with replay.replaying():
        replay.freeze(frozen)
        config.finalize_model_grads_func(chunks)
        for name, operator in operators.items():
            asking = {norm.requires_grad for norm in operator.parameters.values()}
            assert asking == {name not in frozen}
    return {
        name: norm.main_grad
        for operator in operators.values()
        for name, norm in operator.parameters.items()
    }


@pytest.mark.usefixtures('initialized')
def test_frozen_operators_do_not_change_the_order_of_gradient_sums() -> None:
    """Upstream packs the gradients of norms; their offset decides the order of summation."""
    trained, replayed = gradients_of_norms(), gradients_of_norms('layer1.rest')
    for name, gradient in trained.items():
        if name.endswith('layer2.rest'):
            assert torch.equal(replayed[name], gradient)
            assert gradient.abs().max() > 4, 'the ranks have been added up'
