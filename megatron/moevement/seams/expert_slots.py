# SPDX-License-Identifier: Apache-2.0
"""Gives each rank slots for experts, and spreads the tokens over the replicas of an expert.

Upstream's layers divide their experts evenly over the ranks. Here a layer has as many *slots* as
its dispatcher and its expert module have experts, and a placement says which expert is in which
slot (`plan.expert_placement`). The router and all settings keep the number of experts that the user
gives. Between router and dispatcher each token goes to a slot of its experts (Lazarus, arXiv
2407.04656, algorithm 1): every replica computes an equal share of the expert's tokens, as many of
them as possible on the rank that they are on. Sizes differ, nothing is padded, no token is dropped.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

from megatron.moevement.facts import Chunks
from megatron.moevement.seams import patches
from moevement_ext.config import OFF, ConfigurationError, SparseCheckpointConfig
from moevement_ext.logger import logger_of
from moevement_ext.plan.expert_placement import Placement, feasible, place

logger = logger_of(__name__)

_LAYER = 'megatron.core.transformer.moe.moe_layer:MoELayer'

# Settings that slots work with, and their values.
_WORKS: dict[str, tuple[object, ...]] = {
    'tensor_model_parallel_size': (1,),
    'expert_tensor_parallel_size': (1, None),
    'context_parallel_size': (1,),
    'virtual_pipeline_model_parallel_size': (None,),
    'moe_token_dispatcher_type': ('alltoall',),
    'moe_expert_capacity_factor': (None,),
    'moe_grouped_gemm': (False,),
    'overlap_moe_expert_parallel_comm': (False,),
    'cuda_graph_impl': ('none',),
    'mtp_num_layers': (None,),
    'fp8': (None,),
    'fp4': (None,),
    'optimizer': ('adam',),
    'use_precision_aware_optimizer': (False,),
    'save': (None,),  # a checkpoint would have slots for experts
    'load': (None,),
}


def refuse(settings: Mapping[str, Any], config: SparseCheckpointConfig, own_loop: bool) -> None:
    """Refuse slots for experts with settings that they do not work with.

    Raises:
        ConfigurationError: the message names the first such setting.
    """
    for reason in ["a loop that is not upstream's"] if own_loop else _reasons(settings, config):
        raise ConfigurationError(
            f'expert_slots {config.expert_slots} does not work with {reason}: leave one of them '
            'out.'
        )
    every, longest = config.expert_rebalance, config.longest_window
    if 0 < every < longest:
        raise ConfigurationError(
            f'expert_rebalance {every} must be at least {longest}, the longest window, which must '
            'fit between two rebalances: raise it, or set a shorter --sparse-ckpt-window.'
        )
    experts, ranks = settings['num_experts'], settings['expert_model_parallel_size']
    feasible(experts, ranks, config.expert_slots, config.expert_replicas)


def _reasons(settings: Mapping[str, Any], config: SparseCheckpointConfig) -> Iterator[str]:
    if config.lossy:
        yield f'--sparse-ckpt-strategy {config.strategy}'
    if config.elastic != OFF:
        yield f'--sparse-ckpt-elastic {config.elastic}'
    for name, values in _WORKS.items():
        if settings.get(name, values[0]) not in values:
            yield f'--{name.replace("_", "-")} {settings[name]}'
    if not settings.get('num_experts'):
        yield 'a model without --num-experts'
    ranks = settings['expert_model_parallel_size']
    stage = settings['world_size'] // settings['pipeline_model_parallel_size']
    if ranks != stage:
        yield f'--expert-model-parallel-size {ranks}, which must be all {stage} ranks of a stage'


class SlotTable:
    """Slots of the experts of one layer.

    `placement`: experts in the slots of each rank of the expert-parallel group, int64 [ranks,
    slots].

    Attributes:
        held: slots of an expert on a rank, int64 [ranks, experts].
        first: its first slot there, counted over all ranks, int64 [ranks, experts]; undefined
            where it has none.
    """

    def __init__(self, placement: torch.Tensor, experts: int) -> None:
        of_slots = torch.nn.functional.one_hot(placement, experts)
        self.held = of_slots.sum(1)
        ranks, self.slots = placement.shape
        self.first = of_slots.argmax(1)
        self.first += self.slots * torch.arange(ranks, device=placement.device)[:, None]


def sent(counts: torch.Tensor, held: torch.Tensor, rank: int) -> torch.Tensor:
    """Tokens of each expert that `rank` sends to each rank, int64 [ranks, experts].

    All ranks compute the same from `counts`, the tokens of each expert that each rank has routed,
    int64 [ranks, experts]. A rank with k slots of an expert gets k shares of its tokens.
    """
    ends = held.cumsum(0) * counts.sum(0) // held.sum(0)
    capacity = ends.diff(dim=0, prepend=torch.zeros_like(ends[:1]))
    own = torch.minimum(counts, capacity)
    rest, room = counts - own, capacity - own
    # The tokens that are left over, in the order of ranks, fill the room of the ranks in turn.
    last, filled = rest.cumsum(0)[rank], room.cumsum(0)
    tokens = torch.minimum(last, filled) - torch.maximum(last - rest[rank], filled - room)
    tokens = tokens.clamp(min=0)
    tokens[rank] += own[rank]
    return tokens


def spread(
    probs: torch.Tensor, routed: torch.Tensor, counts: torch.Tensor, table: SlotTable, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing by slots, [tokens, slots], from that by experts, [tokens, experts].

    The first tokens of an expert stay on this rank, the next go to the other ranks in turn.
    """
    ranks, experts = counts.shape
    targets = (torch.arange(ranks, device=counts.device) + rank) % ranks
    ends = sent(counts, table.held, rank)[targets].T.flatten().cumsum(0)  # by expert, then target
    expert, token = routed.T.nonzero(as_tuple=True)  # in the same order of experts
    turn = torch.searchsorted(ends, torch.arange(len(token), device=ends.device), right=True)
    slot = table.first[targets[turn - ranks * expert], expert]
    shape = len(routed), ranks * table.slots
    by_slot = routed.new_zeros(shape)
    by_slot[token, slot] = True
    return probs.new_zeros(shape).index_put((token, slot), probs[token, expert]), by_slot


class ExpertSlots:
    """Builds upstream's layers with slots. Training thread only.

    `slots`: of each rank, in each layer; `replicas`: of each expert at least, if slots suffice.
    """

    def __init__(self, slots: int, replicas: int) -> None:
        self._slots = slots
        self._replicas = replicas
        self._told = False

    def install(self) -> None:
        """Wrap upstream's layers, for the lifetime of the process, before the model is built."""
        patches.wrap(f'{_LAYER}.__init__', self._build)
        patches.wrap(f'{_LAYER}.route', self._route)

    def tokens_of(self, experts: int) -> Sequence[float]:
        """Tokens of each expert of a layer, which place it at first: equal, as none are counted."""
        return [1.0] * experts

    def place(
        self, tokens: Sequence[float], ranks: int, before: Placement | None = None
    ) -> list[tuple[int, ...]]:
        """Experts in the slots of each rank; see `plan.expert_placement.place`."""
        return place(tokens, ranks, self._slots, self._replicas, before)

    def _build(self, original: Callable[..., None], layer: Any, config: Any, **call: Any) -> None:
        router = call['submodules'].router
        group = (call.get('pg_collection') or get_default_pg_collection()).ep
        experts: int = config.num_moe_experts
        with_slots = copy.copy(config)
        with_slots.num_moe_experts = self._slots * group.size()

        def of_experts(**given: Any) -> object:
            return router(**{**given, 'config': config})

        call['submodules'] = dataclasses.replace(call['submodules'], router=of_experts)
        original(layer, with_slots, **call)
        self._say(experts, group.size())
        placement = torch.tensor(self.place(self.tokens_of(experts), group.size()))
        counted = torch.zeros(experts, dtype=torch.int64)
        # Buffers of the router, so that windows have them, and a broken iteration is undone.
        for name, buffer in ('placement', placement), ('tokens', counted):
            layer.router.register_buffer(name, buffer, persistent=False)
        layer.expert_slots = self

    def _say(self, experts: int, ranks: int) -> None:
        found = feasible(experts, ranks, self._slots, self._replicas)
        if found < self._replicas and not self._told and torch.distributed.get_rank() == 0:
            logger.warning(
                'replicas of each expert: %d, not %d, as %d ranks have %d slots for %d experts',
                found,
                self._replicas,
                ranks,
                ranks * self._slots,
                experts,
            )
        self._told = True

    def _route(
        self,
        original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        layer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routed = original(layer, *args, **kwargs)
        router, group = layer.router, layer.ep_group
        local = routed.sum(0, dtype=torch.int64)
        parts = [torch.empty_like(local) for _ in range(group.size())]
        torch.distributed.all_gather(parts, local, group=group)
        counts = torch.stack(parts)
        if torch.is_grad_enabled():  # not in evaluations, and once if the layer is recomputed
            router.tokens.add_(counts.sum(0))
        table = SlotTable(router.placement, len(local))
        return spread(probs, routed, counts, table, group.rank())


def layers_with_slots(model: Chunks) -> Iterator[Any]:
    """Upstream's layers of this rank that have slots."""
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, MoELayer) and hasattr(module, 'expert_slots'):
                yield module
