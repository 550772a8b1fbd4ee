# SPDX-License-Identifier: Apache-2.0
"""The part of each parameter's optimizer state that this rank owns, for any known optimizer.

Three optimizers of upstream are known: the distributed optimizer (a rank owns a contiguous shard of
each data-parallel buffer), and the mixed-precision and fp32 optimizers (state replicated over the
data-parallel ranks; each rank *captures* an even share of every parameter, so that no element is
written twice).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)

from megatron.moevement.facts import Chunks, MegatronOptimizer
from megatron.moevement.state import low_precision
from moevement_ext.capture.trainer_state import broadcast_packed
from moevement_ext.errors import SparseCheckpointError

# Class names of known optimizers other than torch's Adam; their packages may be missing.
_KNOWN = ('FusedAdam', 'TensorParallelMuon')


@dataclass
class ParameterState:
    """One parameter's optimizer state on this rank.

    `main` is the optimizer's parameter: elements [held_start, held_end) of the flattened parameter
    (all elements without the distributed optimizer), as fp32 masters or as the compute weights
    themselves. This rank captures the elements `share` of `main`. `group` is the data-parallel
    group to gather from after a restore; None if upstream's own parameter all-gather does it.
    """

    name: str
    parameter: torch.nn.Parameter
    main: torch.Tensor
    inner: torch.optim.Optimizer
    held_start: int
    share: range
    group: torch.distributed.ProcessGroup | None

    @property
    def start(self) -> int:
        """First element of the flattened parameter that this rank captures."""
        return self.share.start

    @property
    def end(self) -> int:
        """The element after the last one that this rank captures."""
        return self.share.stop

    def weight(self) -> torch.Tensor:
        """Flat view of the captured range of the compute weights; bytes if fp8."""
        return low_precision.raw(self.parameter).detach().view(-1)[self.start : self.end]

    def weight_has_scale(self) -> bool:
        """True for fp8, which is rounded with a scale that the master does not determine."""
        return low_precision.weight_scale(self.parameter) is not None

    def master(self) -> torch.Tensor:
        """Flat view of the captured range of `main`."""
        return self._captured(low_precision.raw(self.main))

    def updates_weight(self) -> bool:
        """True if the optimizer writes the compute weights itself.

        This holds in fp32, and where the optimizer state holds the masters. A master of 16 or 8
        bits does not determine the weight: both are rounded from the result of the update.
        """
        return low_precision.raw(self.main).data_ptr() == self.weight_of_main().data_ptr()

    def weight_of_main(self) -> torch.Tensor:
        """Compute weights of the elements that `main` holds."""
        flat = low_precision.raw(self.parameter).detach().view(-1)
        return flat[self.held_start : self.held_start + self.main.numel()]

    def elements(self) -> dict[str, torch.Tensor]:
        """Flat views of the captured range of each elementwise state, in its stored data type.

        These are the moments, and the masters if the optimizer holds them.
        """
        state = self.inner.state[self.main]
        return {
            key: self._captured(low_precision.raw(value))
            for key, value in sorted(state.items())
            if torch.is_tensor(value) and value.numel() == self.main.numel() and key != 'step'
        }

    def scales(self) -> dict[str, torch.Tensor]:
        """Factors of scaled elementwise states, fp32 [1] each, by name."""
        return low_precision.scales(self.inner, self.main)

    def drop_gradient(self) -> None:
        """Make the next update leave this parameter and its state unchanged."""
        self.main.grad = None
        self.main.decoupled_grad = None  # type: ignore[attr-defined]

    def step(self) -> torch.Tensor | None:
        """The parameter's own step count (torch's Adam); None where groups count steps."""
        step: torch.Tensor | None = self.inner.state[self.main].get('step')
        return step

    def _captured(self, held: torch.Tensor) -> torch.Tensor:
        flat = held.detach().view(-1)
        return flat[self.start - self.held_start : self.end - self.held_start]


def parameter_states(
    optimizer: MegatronOptimizer, names: dict[torch.nn.Parameter, str]
) -> dict[torch.nn.Parameter, ParameterState]:
    """Optimizer state that this rank owns, by parameter.

    Raises:
        SparseCheckpointError: the type of optimizer is unknown.
    """
    states: dict[torch.nn.Parameter, ParameterState] = {}
    for inner in chained(optimizer):
        _require_known(inner.optimizer)
        _allocate(inner)
        for state in _states_of(inner, names):
            states[state.parameter] = state
    return states


def chained(optimizer: MegatronOptimizer) -> Iterator[Any]:
    """Optimizers in upstream's chain that hold state."""
    for inner in links(optimizer):
        if not getattr(inner, 'is_stub_optimizer', False):
            yield inner


def links(optimizer: MegatronOptimizer) -> Iterator[Any]:
    """All optimizers in upstream's chain, also those without parameters on this rank."""
    if isinstance(optimizer, ChainedOptimizer):
        for inner in optimizer.chained_optimizers:
            yield from links(inner)
    else:
        yield optimizer


def counts_steps_per_parameter(inner: torch.optim.Optimizer) -> bool:
    """True for torch's Adam."""
    return isinstance(inner, torch.optim.Adam)


def counts_steps_per_group(inner: torch.optim.Optimizer) -> bool:
    """True for the Adam of TE and of Apex. Muon counts no steps."""
    return any(kind.__name__ == 'FusedAdam' for kind in type(inner).__mro__)


def _allocate(optimizer: MegatronOptimizer) -> None:
    """Create the state now instead of in the first step, so that captures have fixed sources."""
    inner = optimizer.optimizer
    if optimizer.config.use_precision_aware_optimizer:
        _allocate_low_precision(inner)
    else:
        optimizer.init_state_fn(inner, optimizer.config)
    if counts_steps_per_parameter(inner):
        for state in inner.state.values():
            state.setdefault('step', torch.tensor(0.0, dtype=torch.float32))


def _allocate_low_precision(inner: Any) -> None:
    """Create the state as the step of TE's FusedAdam does.

    Upstream's `init_state_fn` omits an argument that has had no default since TE 2.1.
    """
    for parameter in _all_params(inner):
        if not inner.state[parameter]:
            remainders = inner.store_param_remainders and parameter.dtype == torch.bfloat16
            inner.initialize_state(parameter, remainders)


def _states_of(
    optimizer: MegatronOptimizer, names: dict[torch.nn.Parameter, str]
) -> Iterator[ParameterState]:
    inner = optimizer.optimizer
    if isinstance(optimizer, DistributedOptimizer):
        yield from _distributed(optimizer, names)
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        yield from _mixed_precision(optimizer, names)
    elif isinstance(optimizer, FP32Optimizer):
        for parameter in _all_params(inner):
            yield _replicated(names[parameter], parameter, parameter, inner)
    else:
        raise SparseCheckpointError(
            f'--sparse-ckpt does not support the optimizer {type(optimizer).__name__}; use '
            '--optimizer adam or muon, or train without --sparse-ckpt.'
        )


def _require_known(inner: Any) -> None:
    known = any(kind.__name__ in _KNOWN for kind in type(inner).__mro__)
    if not isinstance(inner, torch.optim.Adam) and not known:
        raise SparseCheckpointError(
            f'--sparse-ckpt supports Adam and Muon; the inner optimizer is {type(inner).__name__}. '
            'Use --optimizer adam or muon, or train without --sparse-ckpt.'
        )


def _all_params(inner: torch.optim.Optimizer) -> Iterator[Any]:
    for group in inner.param_groups:
        yield from group['params']


def _distributed(
    optimizer: DistributedOptimizer, names: dict[torch.nn.Parameter, str]
) -> Iterator[ParameterState]:
    for parameter, (group, order) in optimizer.model_param_group_index_map.items():
        main = optimizer.optimizer.param_groups[group]['params'][order]
        shard = optimizer._get_model_param_range_map(parameter)['param']
        yield ParameterState(
            names[parameter],
            parameter,
            main,
            optimizer.optimizer,
            held_start=shard.start,
            share=range(shard.start, shard.end),
            group=None,
        )


def _mixed_precision(
    optimizer: Float16OptimizerWithFloat16Params, names: dict[torch.nn.Parameter, str]
) -> Iterator[ParameterState]:
    inner = optimizer.optimizer
    for parameters, mains in zip(
        optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True
    ):
        for parameter, main in zip(parameters, mains, strict=True):
            yield _replicated(names[parameter], parameter, main, inner)
    for parameters in optimizer.fp32_from_fp32_groups:
        for parameter in parameters:
            yield _replicated(names[parameter], parameter, parameter, inner)


def _replicated(
    name: str, parameter: torch.nn.Parameter, main: torch.Tensor, inner: torch.optim.Optimizer
) -> ParameterState:
    group = data_parallel_group(parameter)
    captured = share(parameter.numel(), group.rank(), group.size())
    return ParameterState(name, parameter, main, inner, 0, range(*captured), group)


def data_parallel_group(parameter: torch.nn.Parameter) -> torch.distributed.ProcessGroup:
    """Group of the ranks that hold the same values of this parameter."""
    group: torch.distributed.ProcessGroup = (
        parallel_state.get_data_parallel_group(with_context_parallel=True)
        if getattr(parameter, 'allreduce', True)
        else parallel_state.get_expert_data_parallel_group()
    )
    return group


def share(numel: int, rank: int, size: int) -> tuple[int, int]:
    """The even share [start, end) of `numel` elements that `rank` of `size` captures."""
    return numel * rank // size, numel * (rank + 1) // size


@torch.no_grad()
def complete_restore(
    states: Sequence[ParameterState],
    model: Chunks,
    frozen: frozenset[str],
    distributed: bool,
) -> None:
    """Complete weights and replicated state after each rank has restored its own range.

    Collective over all ranks of a stage. Thawed parameters get their compute weights from the
    masters, except weights with their own capture: those that the optimizer writes itself, and fp8.
    Frozen parameters get masters equal to the compute weights, so that upstream's copy of masters
    to weights writes the same bits; with fp8 the copy may write other bits, until the next slot
    restores the weights.

    `states` are of the restored parameters; those named in `frozen` hold compute weights only. With
    `distributed`, ranks that restored nothing also take part in upstream's all-gather.
    """
    for state in states:
        if state.updates_weight() or state.weight_has_scale():
            continue
        if state.name in frozen:
            state.master().copy_(state.weight())
        else:
            state.weight().copy_(state.master())
    if distributed:
        for chunk in model:
            chunk.start_param_sync(force_sync=True)
    else:
        _gather_replicated(states)


def _gather_replicated(states: Sequence[ParameterState]) -> None:
    for dense in (True, False):  # the same order on every rank
        members = [s for s in states if getattr(s.parameter, 'allreduce', True) is dense]
        group = members[0].group if members else None
        if group is not None:
            for source in range(group.size()):
                captured = (part for s in members for part in _share_of(s, source, group.size()))
                rank = torch.distributed.get_global_rank(group, source)
                broadcast_packed(captured, rank, group, members[0].parameter.device)


def _share_of(state: ParameterState, rank: int, size: int) -> Iterator[torch.Tensor]:
    start, end = share(state.parameter.numel(), rank, size)
    tensors = [state.main, state.parameter]
    tensors += [low_precision.raw(state.inner.state[state.main][key]) for key in state.elements()]
    for tensor in tensors:
        yield tensor.detach().view(-1)[start:end]
