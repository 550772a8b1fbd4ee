# SPDX-License-Identifier: Apache-2.0
"""Keeps the replicas of an expert equal, bit for bit, where experts have slots, and moves them.

A holder has the gradient of the tokens that it computed. All holders add the gradients of all in
the order of ranks, so that they make the same update. In the norm an expert counts on its first
holder only. Of several slots of a rank with one expert only the first gets tokens; the others take
over its gradient.

A rebalance places the experts again, by the tokens counted since the one before. It belongs to the
update of its iteration: a rank that is lost within it leaves its stage to replay from a window, as
one that is lost between two optimizers does. Windows have placements and counts, which are buffers;
one begins at each rebalance, and none goes across, so that a replay comes to a rebalance with whole
experts only.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import P2POp

from megatron.moevement.facts import Chunks, MegatronOptimizer, TransformerConfig
from megatron.moevement.seams import patches
from megatron.moevement.seams.expert_slots import layers_with_slots
from megatron.moevement.state import low_precision
from megatron.moevement.state.model_operators import Operator
from megatron.moevement.state.optimizer_state import ParameterState
from moevement_ext.memory.tensors import copy_all
from moevement_ext.plan.expert_placement import NewExpert, Placement, moves
from moevement_ext.regroup.waits import waited

type _Slot = tuple[torch.nn.Parameter, ...]


class _LayerSlots(NamedTuple):
    layer: Any  # upstream's
    slots: list[_Slot]  # of this rank


class _Expert(NamedTuple):
    holders: list[int]  # global ranks, ascending
    copies: list[_Slot]  # slots of this rank


class ExpertReplicas:
    """Replicas of the experts that this rank holds; none without slots. Training thread only.

    All ranks of a stage call it together. `states` has the whole state of each expert, as all
    ranks of a stage belong to one expert-parallel group. Experts are placed again after `every`
    iterations; 0: never.
    """

    def __init__(
        self,
        model: Chunks,
        operators: Mapping[str, Operator],
        states: Mapping[torch.nn.Parameter, ParameterState],
        every: int = 0,
    ) -> None:
        self._states = states
        self._every = every
        self._rank = torch.distributed.get_rank()
        self._layers = [_LayerSlots(it, _slots(operators, it)) for it in layers_with_slots(model)]
        self._placed: list[Placement] = []
        self._experts: list[_Expert] = []  # of two ranks that share some in the same order
        self._iteration = 0
        self.begin(0)

    def begin(self, iteration: int) -> None:
        """Note the number of iterations so far, and read where experts are. Waits for the device.

        A load of a slot may have brought another placement.
        """
        self._iteration = iteration
        placed: list[Placement] = [layer.router.placement.tolist() for layer, _ in self._layers]
        if placed == self._placed:
            return
        self._placed, self._experts = placed, []
        for (layer, slots), rows in zip(self._layers, placed, strict=True):
            self._group = layer.ep_group
            ranks, own = self._ranks, rows[self._group.rank()]
            for expert in sorted({*own}):
                holders = [ranks[at] for at, row in enumerate(rows) if expert in row]
                copies = [slot for slot, held in zip(slots, own, strict=True) if held == expert]
                self._experts.append(_Expert(holders, copies))
        self._count_once()

    def install(self, config: TransformerConfig) -> None:
        """Add gradients of replicas as the last step of upstream's reductions. Wraps once."""
        reduction = config.finalize_model_grads_func
        if not self._layers or getattr(reduction, 'replicas', None) is self:
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

    def rebalances(self, iteration: int) -> bool:
        """True if experts are placed again after `iteration`, in all stages."""
        return self._every > 0 and iteration % self._every == 0

    def wrap(self, optimizer: MegatronOptimizer) -> None:
        """Rebalance as the last part of an update; call it before the engine wraps the update."""

        def step_and_rebalance(step: Callable[[], tuple[bool, object, object]]) -> object:
            result = step()
            if result[0] and self.rebalances(self._iteration + 1):  # else the update is skipped
                self.rebalance()
            return result

        if self._layers:
            patches.wrap_object(optimizer, 'step', step_and_rebalance)

    @torch.no_grad()
    def rebalance(self) -> None:
        """Place the experts by their tokens, and move those that are new on a rank. Collective."""
        moved = total = 0
        for (layer, slots), before in zip(self._layers, self._placed, strict=True):
            router = layer.router
            after = layer.expert_slots.place(router.tokens.tolist(), len(before), before)
            size = sum(_sizes(self._bytes_of(slots[0])))
            moved += size * self._move(slots, size, before, after)
            total += size * len(before) * len(slots)
            router.placement.copy_(torch.tensor(after))
            router.tokens.zero_()
        self.begin(self._iteration)
        if self._group.rank() == 0:
            after_it = f'after iteration {self._iteration + 1}'
            shares = f'{moved} of {total} bytes moved'
            print(f' sparse ckpt | experts placed again {after_it}: {shares} |', flush=True)

    def _move(self, slots: list[_Slot], size: int, before: Placement, after: Placement) -> int:
        """Fill the slots of a layer that get another expert of `size` bytes; returns the sends.

        Nothing is written before all that this rank sends is copied.
        """
        own, ranks, planned = self._group.rank(), self._ranks, moves(before, after)
        sent, wanted = (
            defaultdict[int, list[torch.Tensor]](list),
            defaultdict[int, list[NewExpert]](list),
        )
        for move in planned:
            if move.source == own:
                held = slots[before[own].index(move.expert)]
                sent[ranks[move.target]].append(torch.cat(self._bytes_of(held)))
            if move.target == own:
                wanted[ranks[move.source]].append(move)
        like = torch.empty(0, dtype=torch.uint8, device=slots[0][0].device)
        sizes = {rank: [size] * len(here) for rank, here in wanted.items()}
        for rank, states in self._exchange(sent, sizes, like).items():
            for move, state in zip(wanted[rank], states, strict=True):
                for slot in move.slots:
                    parts = self._bytes_of(slots[slot])
                    copy_all(parts, state.split(_sizes(parts)))
        return sum(move.source != move.target for move in planned)

    def _count_once(self) -> None:
        """Let upstream's norm leave out all copies but one."""
        for holders, copies in self._experts:
            for slot, copy in enumerate(copies):
                for parameter in copy:
                    shared = slot > 0 or holders[0] != self._rank
                    for tensor in (parameter, self._states[parameter].main):
                        tensor.shared = shared  # type: ignore[attr-defined]

    @property
    def _ranks(self) -> list[int]:
        """Global ranks of the stage."""
        return torch.distributed.get_process_group_ranks(self._group)

    def _of_holders(self, own: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """For each expert the `own` tensors of its holders, in the order of ranks. Collective."""
        sent = defaultdict[int, list[torch.Tensor]](list)
        for expert, tensor in zip(self._experts, own, strict=True):
            for rank in expert.holders:
                sent[rank].append(tensor)
        sizes = {rank: _sizes(tensors) for rank, tensors in sent.items()}
        received = self._exchange(sent, sizes, own[0]) if own else {}
        for expert in self._experts:
            yield [next(received[rank]) for rank in expert.holders]

    def _exchange(
        self,
        sent: Mapping[int, list[torch.Tensor]],
        sizes: Mapping[int, list[int]],
        like: torch.Tensor,
    ) -> dict[int, Iterator[torch.Tensor]]:
        """Send flat tensors, and receive others of these sizes, by rank, which may be this one."""
        operations, received = [], {}
        for rank in sorted({*sent, *sizes}):
            if rank == self._rank:
                received[rank] = iter(sent[rank])
                continue
            if rank in sent:
                packed = torch.cat(sent[rank])
                operations.append(P2POp(torch.distributed.isend, packed, rank, self._group))
            if rank in sizes:
                packed = like.new_empty(sum(sizes[rank]))
                operations.append(P2POp(torch.distributed.irecv, packed, rank, self._group))
                received[rank] = iter(packed.split(sizes[rank]))
        for work in torch.distributed.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return received

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


def _slots(operators: Mapping[str, Operator], layer: Any) -> list[_Slot]:
    """Parameters in each slot of this rank."""
    names = [f'layer{layer.layer_number}.expert{slot}' for slot in layer.local_expert_indices]
    return [tuple(operators[name].parameters.values()) for name in names]


def _gradients(copy: Sequence[Any]) -> list[torch.Tensor]:
    return [parameter.main_grad.view(-1) for parameter in copy]


def _sizes(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]
