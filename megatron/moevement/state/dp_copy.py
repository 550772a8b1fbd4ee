# SPDX-License-Identifier: Apache-2.0
"""Copies a lost rank's state from a replica, instead of a replay, where replicas exist.

Without the distributed optimizer the data-parallel ranks of a stage hold the same parameters,
masters and moments; with expert parallelism, those of the same experts. In upstream's trainer they
also draw the same random numbers; a custom loop declares whether they do.
"""

from collections.abc import Iterator, Mapping

import torch
from megatron.core import parallel_state

from megatron.moevement.facts import JobFacts
from megatron.moevement.state.model_operators import Operator
from megatron.moevement.state.optimizer_state import ParameterState
from moevement_ext.capture.trainer_state import broadcast_packed


def replicas(facts: JobFacts, lengths_differ: bool = False) -> list[int]:
    """Other global ranks with the same state as this rank; none where state is sharded.

    If the lengths of sequences in an iteration differ, dropout draws more numbers on some
    data-parallel ranks, whose generators differ from then on.
    """
    if facts.use_distributed_optimizer or facts.data_parallel_random_init or lengths_differ:
        return []
    if not facts.copies_from_peers:
        return []
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    expert = parallel_state.get_expert_data_parallel_group()
    same = set(_ranks(dense)) & set(_ranks(expert))
    if same != set(_ranks(expert)):
        return []
    return sorted(same - {facts.rank})


def twins(facts: JobFacts) -> list[int]:
    """Other global ranks that capture the same state as this rank.

    With several instances of the distributed optimizer: the ranks with the same shard. Random
    numbers and amax histories may differ. Empty without the distributed optimizer, where each
    data-parallel rank captures another share, and where parameters may differ.
    """
    if not facts.use_distributed_optimizer or facts.data_parallel_random_init:
        return []
    instances = parallel_state.get_inter_distributed_optimizer_instance_group(
        check_initialized=False
    )
    if instances is None:
        return []
    dense = _ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
    same = _ranks(instances)
    shard = len(dense) // len(same)
    if same != dense[dense.index(facts.rank) % shard :: shard]:
        return []
    return sorted({*same} - {facts.rank})


def copy_state(
    operators: Mapping[str, Operator],
    states: Mapping[torch.nn.Parameter, ParameterState],
    source: int,
) -> None:
    """Copy the state of rank `source` to all replicas. Collective over the replicas."""
    group = parallel_state.get_expert_data_parallel_group()
    device = next(iter(states)).device
    broadcast_packed(_tensors(operators, states), source, group, device)


def _tensors(
    operators: Mapping[str, Operator], states: Mapping[torch.nn.Parameter, ParameterState]
) -> Iterator[torch.Tensor]:
    """All tensors that training changes, in the same order on all replicas."""
    for operator in operators.values():
        yield from operator.buffers.values()
        yield from operator.scaling.values()
        for parameter in operator.parameters.values():
            yield parameter.detach()
            if parameter in states:
                yield from _optimizer_tensors(states[parameter])


def _optimizer_tensors(state: ParameterState) -> Iterator[torch.Tensor]:
    if not state.updates_weight():
        yield state.main.detach()
    for _, value in sorted(state.inner.state[state.main].items()):
        if torch.is_tensor(value):
            yield value


def _ranks(group: torch.distributed.ProcessGroup) -> list[int]:
    return torch.distributed.get_process_group_ranks(group)
