# SPDX-License-Identifier: Apache-2.0
"""Has data-parallel peers compute the micro-batches of guests (the re-routing of ReCycle).

Two ranks on one device halve the speed of all. A *guest* keeps its place in all groups, its
optimizer shard and its data. Its peers, which hold the same weights, compute its micro-batches in
turn: each puts its own sums aside, takes those of the guest, runs a piece of the guest's
micro-batches by upstream's schedule, and hands on to the next peer, the last one to the guest. The
order of all sums and draws is that of a guest that computes, so every bit is.

A *unit* is the smallest set of data-parallel places that expert and context parallelism connect. A
unit with a guest in any pipeline stage is routed as a whole, each place to the same of other units.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import InitVar, dataclass
from typing import Any

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron.moevement.facts import Chunks, Settings
from megatron.moevement.seams import patches
from megatron.moevement.seams.schedules import SCHEDULES
from megatron.moevement.state.handing_on import Accumulating, Line
from megatron.moevement.state.model_operators import Operator
from moevement_ext.config import GLOBAL, SparseCheckpointConfig
from moevement_ext.logger import logger_of
from moevement_ext.memory.tensors import decoded

logger = logger_of(__name__)

_SCHEDULES = 'megatron.core.pipeline_parallel.schedules'

# Settings with which guests compute their own micro-batches, and the values that are routed.
_ROUTABLE: dict[str, tuple[object, ...]] = {
    'virtual_pipeline_model_parallel_size': (None,),
    'overlap_moe_expert_parallel_comm': (False,),
    'hybrid_context_parallel': (False,),
    'cuda_graph_impl': ('none',),
    'fp8': (None,),  # amax reductions over data-parallel ranks in each micro-batch
    'fp4': (None,),
    'mtp_num_layers': (None,),
    'moe_paged_stash': (False,),
    'fine_grained_activation_offloading': (False,),
}
_OVER_ALL_RANKS = 'global_aux_loss'
_NO_OTHER_UNIT = 'a guest in every expert-parallel unit'
OWN_LOOP = "a loop that is not upstream's"
"""A reason: its forward step may have a state that nothing hands on."""

_BATCHES = msgspec.msgpack.Decoder(list[dict[str, torch.Tensor | None]], ext_hook=decoded)


def not_routed(settings: Settings, config: SparseCheckpointConfig) -> str | None:
    """Why guests compute their own micro-batches; None if their peers do."""
    for name, values in _ROUTABLE.items():
        if settings.get(name, values[0]) not in values:
            return f'--{name.replace("_", "-")}'
    if _OVER_ALL_RANKS in str(settings.get('moe_router_load_balancing_type')):
        return f'--moe-router-load-balancing-type {_OVER_ALL_RANKS}'
    if settings.get('pipeline_model_parallel_size', 1) != 1 and config.recovery != GLOBAL:
        return 'a pipeline without --sparse-ckpt-recovery global'
    return None


@dataclass(eq=False)
class Routes:
    """Routes around the guests of this iteration. Training thread only.

    Args:
        reason: why guests compute their own micro-batches; None: they do not.
        guests: returns the ranks that are guests, in the training thread's round.
        stage_of: returns the pipeline stage by rank.
        operators: returns the operators of this rank.
    """

    _reason: str | None
    _guests: Callable[[], Sequence[int]]
    _stage_of: Callable[[], Sequence[int]]
    _operators: Callable[[], Mapping[str, Operator]]
    _before: Sequence[int] = ()

    def install(self) -> None:
        """Wrap the schedules, for the lifetime of the process, before any wrapper of results."""
        for name in SCHEDULES:
            patches.wrap(f'{_SCHEDULES}:{name}', self._run)

    def _run(self, original: Callable[..., Any], **call: Any) -> Any:
        if call.get('forward_only'):
            return original(**call)
        guests, reason, broken = self._guests(), self._reason, list[int]()
        if guests and reason is None:
            broken = self._broken_units(guests)
            places: int = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
            if len(broken) == places // unit_size():
                reason = _NO_OTHER_UNIT
        self._log(guests, reason)
        if not guests or reason is not None:
            return original(**call)
        call['model'] = call['model'] if isinstance(call['model'], list) else [call['model']]
        return _Iteration(original, call, Line(), broken, self._operators()).run()

    def _log(self, guests: Sequence[int], reason: str | None) -> None:
        if guests == self._before or torch.distributed.get_rank() != 0:
            return
        self._before = guests
        if not guests:
            logger.warning('no rank is a guest any more')
        elif reason is None:
            logger.warning('ranks %s are guests; their peers compute their micro-batches', guests)
        else:
            logger.warning(
                'ranks %s are guests and compute for themselves, at the cost of speed: '
                'routes do not work with %s',
                guests,
                reason,
            )

    def _broken_units(self, guests: Sequence[int]) -> list[int]:
        """Units with a guest in any stage, by its place among the ranks of its stage."""
        stage_of = self._stage_of()
        ranks = parallel_state.get_tensor_model_parallel_world_size() * unit_size()
        places = [sum(stage == stage_of[one] for stage in stage_of[:one]) for one in guests]
        return sorted({place // ranks for place in places})


def unit_size() -> int:
    """Data-parallel places of a unit; consecutive ones, in upstream's order of ranks."""
    experts: int = parallel_state.get_expert_model_parallel_world_size()
    experts *= parallel_state.get_expert_tensor_parallel_world_size() or 1
    contexts: int = parallel_state.get_context_parallel_world_size()
    tensor: int = parallel_state.get_tensor_model_parallel_world_size()
    return max(contexts, experts // tensor, 1)


def pieces(micro_batches: int, hosts: int) -> list[int]:
    """Number of a guest's micro-batches for each host, which differ by at most one."""
    return [
        micro_batches * (host + 1) // hosts - micro_batches * host // hosts for host in range(hosts)
    ]


@dataclass(eq=False)
class _Iteration:
    """One iteration of this rank with routes."""

    _schedule: Callable[..., Any]
    _call: dict[str, Any]
    _line: Line
    _broken: Sequence[int]
    operators: InitVar[Mapping[str, Operator]]

    def __post_init__(self, operators: Mapping[str, Operator]) -> None:
        call, line = self._call, self._line
        self._size = unit_size()
        self._unit, self._place = divmod(line.place, self._size)
        self._hosts = [n for n in range(len(line.ranks) // self._size) if n not in self._broken]
        self._model: Chunks = call['model']
        self._total: int = call['num_microbatches']
        self._state = Accumulating(self._model, operators)
        iterator = call['data_iterator']
        self._data = iterator[0] if isinstance(iterator, list) else iterator
        self._losses: list[Any] = []
        self._tokens: torch.Tensor | None = None

    def run(self) -> list[Any]:
        """Return the losses of this rank's micro-batches, its gradients reduced."""
        config = get_model_config(self._model[0])
        for chunk in self._model:
            if chunk.ddp_config.overlap_param_gather:  # a guest has no forward pass that does so
                chunk.start_param_sync(force_sync=True)
        with self._in_pieces(config):
            if self._unit in self._broken:
                self._have_computed()
            else:
                self._compute()
        for chunk in self._model:
            if chunk.ddp_config.overlap_grad_reduce:
                chunk.start_grad_sync()
        config.finalize_model_grads_func(
            self._model,
            self._tokens if config.calculate_per_token_loss else None,
            pg_collection=self._call.get('pg_collection'),
            force_all_reduce=self._call.get('force_all_reduce', False),
        )
        return self._losses

    @contextmanager
    def _in_pieces(self, config: Any) -> Iterator[None]:
        """Make several runs of the schedule one iteration.

        They divide losses by the number of all micro-batches, and neither reduce nor measure.
        """

        def divided(step: Callable[..., Any], *given: Any, **more: Any) -> Any:
            first, (_, *rest) = given[:3], given[3:]
            return step(*first, self._total, *rest, **more)

        def collected(_: object, model: Chunks, num_tokens: Any, **more: object) -> None:
            if num_tokens is not None:
                self._tokens = num_tokens if self._tokens is None else self._tokens + num_tokens

        before = config.no_sync_func, config.grad_sync_func, config.timers
        config.no_sync_func = config.grad_sync_func = config.timers = None
        with ExitStack() as stack:
            stack.callback(patches.wrap_object(config, 'finalize_model_grads_func', collected))
            for chunk in self._model:
                stack.enter_context(chunk.no_sync())
            stack.enter_context(patches.wrapped(f'{_SCHEDULES}:forward_step', divided))
            try:
                yield
            finally:
                config.no_sync_func, config.grad_sync_func, config.timers = before

    def _have_computed(self) -> None:
        """Give a guest's data and state to the hosts, and get the state back."""
        for host, number in zip(self._hosts, pieces(self._total, len(self._hosts)), strict=True):
            if self._data is not None:
                self._line.send(self._rank_of(host), [next(self._data) for _ in range(number)])
        self._hand_on(self._hosts[0], [])
        self._losses = self._take_over(self._hosts[-1])

    def _compute(self) -> None:
        """Compute a host's micro-batches, and a piece of those of each guest."""
        turn, numbers = self._hosts.index(self._unit), pieces(self._total, len(self._hosts))
        batches = {unit: self._batches_of(unit) for unit in self._broken}
        first = sum(numbers[:turn])  # in the time that the hosts before need for their pieces
        self._losses += self._part(self._data, first)
        for unit in self._broken:
            take_back, tokens, self._tokens = self._state.put_aside(), self._tokens, None
            last = turn == len(self._hosts) - 1
            found = self._take_over(unit if turn == 0 else self._hosts[turn - 1])
            found += self._part(batches[unit], numbers[turn])
            self._hand_on(unit if last else self._hosts[turn + 1], found)
            take_back()
            self._tokens = tokens
        self._losses += self._part(self._data, self._total - first)

    def _batches_of(self, unit: int) -> Iterator[dict[str, torch.Tensor | None]] | None:
        """Micro-batches of this rank's piece; None in a rank that reads none."""
        if self._data is None:
            return None
        received = self._line.receive(self._rank_of(unit), _BATCHES)
        return iter(received)

    def _part(self, data: object, number: int) -> list[Any]:
        if number == 0:
            return []
        found = self._schedule(**{**self._call, 'data_iterator': data, 'num_microbatches': number})
        return list(found)

    def _rank_of(self, unit: int) -> int:
        return self._line.ranks[unit * self._size + self._place]

    def _hand_on(self, unit: int, losses: list[dict[str, torch.Tensor]]) -> None:
        self._state.hand_on(self._line, self._rank_of(unit), losses, self._tokens)

    def _take_over(self, unit: int) -> list[dict[str, torch.Tensor]]:
        """Losses of the guest's micro-batches so far."""
        taken = self._state.take_over(self._line, self._rank_of(unit))
        device = self._state.gradients[0].device
        if taken.tokens is not None:
            self._tokens = torch.tensor(taken.tokens, dtype=torch.int, device=device)
        return [{name: one.to(device) for name, one in loss.items()} for loss in taken.losses]
