# SPDX-License-Identifier: Apache-2.0
"""Keeps the replicas of an expert equal, bit for bit, where experts have slots.

A holder has the gradient of the tokens that it computed. All holders add the gradients of all in
the order of ranks, so that they make the same update. In the norm an expert counts on its first
holder only. Of several slots of a rank with one expert only the first gets tokens; the others take
over its gradient.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron.moevement.facts import Chunks, TransformerConfig
from megatron.moevement.seams import patches
from megatron.moevement.seams.expert_slots import layers_with_slots
from megatron.moevement.state import low_precision
from megatron.moevement.state.model_operators import Operator
from megatron.moevement.state.optimizer_state import ParameterState
from megatron.moevement.state.resharded_tensors import canonical_name
from moevement_ext.memory.tensors import copy_all
from moevement_ext.regroup.waits import waited


class _Expert(NamedTuple):
    holders: list[int]  # global ranks, ascending
    copies: list[tuple[torch.nn.Parameter, ...]]  # tensors in each slot of this rank


class ExpertReplicas:
    """Replicas of the experts that this rank holds; none without slots. Training thread only.

    All ranks of a stage call it together. `states` has the whole state of each expert, as all
    ranks of a stage belong to one expert-parallel group.
    """

    def __init__(
        self,
        model: Chunks,
        operators: Mapping[str, Operator],
        states: Mapping[torch.nn.Parameter, ParameterState],
    ) -> None:
        self._states = states
        self._rank = torch.distributed.get_rank()
        self._experts: list[_Expert] = []  # of two ranks that share some in the same order
        for layer, table in layers_with_slots(model):
            self._group = layer.ep_group
            ranks = torch.distributed.get_process_group_ranks(self._group)
            for expert in sorted(set(table.placement[self._group.rank()])):
                holders = [ranks[at] for at, row in enumerate(table.placement) if expert in row]
                copies = _copies(operators[f'layer{layer.layer_number}.expert{expert}'])
                self._experts.append(_Expert(holders, copies))
        self._count_once()

    def install(self, config: TransformerConfig) -> None:
        """Add gradients of replicas as the last step of upstream's reductions. Wraps once."""
        reduction = config.finalize_model_grads_func
        if not self._experts or getattr(reduction, 'replicas', None) is self:
            return

        @waited.waiting_for(None)
        def finalize_and_add(
            finalize: Callable[..., object], *args: object, **kwargs: object
        ) -> object:
            result = finalize(*args, **kwargs)
            self.add_gradients()
            return result

        patches.wrap_object(config, 'finalize_model_grads_func', finalize_and_add)
        config.finalize_model_grads_func.replicas = self

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Set the gradient of each expert to the sum over its holders. Collective."""
        own = [torch.cat(_gradients(expert.copies[0])) for expert in self._experts]
        for expert, gradients in zip(self._experts, self._of_holders(own), strict=True):
            total = functools.reduce(torch.add, gradients)
            for copy in expert.copies:
                copy_all(_gradients(copy), total.split(_sizes(copy)))

    @torch.no_grad()
    def equalize(self) -> None:
        """Give all copies the weights and the optimizer state of the first holder. Collective."""
        own = [torch.cat(self._bytes_of(expert.copies[0])) for expert in self._experts]
        for expert, states in zip(self._experts, self._of_holders(own), strict=True):
            for copy in expert.copies:
                parts = self._bytes_of(copy)
                copy_all(parts, states[0].split(_sizes(parts)))

    def _count_once(self) -> None:
        """Let upstream's norm leave out all copies but one."""
        for holders, copies in self._experts:
            for slot, copy in enumerate(copies):
                for parameter in copy:
                    shared = slot > 0 or holders[0] != self._rank
                    for tensor in (parameter, self._states[parameter].main):
                        tensor.shared = shared  # type: ignore[attr-defined]

    def _of_holders(self, own: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """For each expert the `own` tensors of its holders, in the order of ranks. Collective."""
        sent = defaultdict[int, list[torch.Tensor]](list)
        for expert, tensor in zip(self._experts, own, strict=True):
            for rank in expert.holders:
                if rank != self._rank:
                    sent[rank].append(tensor)
        operations, received = [], {}
        for peer, tensors in sorted(sent.items()):
            packed = torch.cat(tensors)
            got = torch.empty_like(packed)
            for operation, tensor in (
                (torch.distributed.isend, packed),
                (torch.distributed.irecv, got),
            ):
                operations.append(torch.distributed.P2POp(operation, tensor, peer, self._group))
            received[peer] = iter(got.split(_sizes(tensors)))
        for work in torch.distributed.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for expert, tensor in zip(self._experts, own, strict=True):
            yield [
                tensor if rank == self._rank else next(received[rank]) for rank in expert.holders
            ]

    def _bytes_of(self, copy: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Weights, masters and moments, flat, as bytes."""
        states = [self._states[parameter] for parameter in copy]
        tensors = [
            tensor
            for state in states
            for tensor in (
                low_precision.raw(state.parameter),
                state.master(),
                *state.elements().values(),
            )
        ]
        return [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]


def _copies(operator: Operator) -> list[tuple[torch.nn.Parameter, ...]]:
    """Tensors of an expert in each of its slots, in an order that all ranks share."""
    found = defaultdict[str, list[torch.nn.Parameter]](list)
    for name, parameter in operator.parameters.items():
        found[canonical_name(operator.name, name, shared=False)].append(parameter)
    return list(zip(*(found[name] for name in sorted(found)), strict=True))


def _gradients(copy: Sequence[Any]) -> list[torch.Tensor]:
    return [parameter.main_grad.view(-1) for parameter in copy]


def _sizes(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]
