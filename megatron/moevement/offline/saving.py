# SPDX-License-Identifier: Apache-2.0
"""Saves the filled model as the run itself would have saved it, in its own layout.

All that upstream saves besides tensors also comes from the windows: the arguments with the sizes of
the run's layout, and the generator states of each of its stages and tensor-parallel ranks, so that
a job in the same layout continues with the same random numbers.
"""

import contextlib
import copy
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.training import checkpointing

from megatron.moevement.built import Built
from megatron.moevement.facts import UpstreamArguments
from megatron.moevement.seams import patches
from megatron.moevement.state import iteration_state
from megatron.moevement.state.iteration_state import IterationState, RngState
from moevement_ext.capture.generators import state_tensor
from moevement_ext.memory.window.placed import Layout, Placed

_RANDOM = 'rng_state'


def save(
    built: Built,
    run: UpstreamArguments,
    states: Mapping[int, IterationState],
    placed: Mapping[int, Placed],
) -> None:
    """Save in the directory that the arguments of the process name; `states` are by owner."""
    first = states[min(states)]
    layout = placed[min(placed)].layout

    def as_the_run(generate: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        state_dict = generate(*args, **kwargs)
        state_dict['args'] = _arguments(run, layout, first)
        state_dict[_RANDOM] = _generators(states, placed, run.data_parallel_random_init)
        return state_dict

    generating = 'megatron.training.checkpointing:generate_state_dict'
    with patches.wrapped(generating, as_the_run), contextlib.redirect_stdout(io.StringIO()):
        checkpointing.save_checkpoint(first.iteration, *built, first.floating_point_operations)


def _arguments(run: UpstreamArguments, layout: Layout, state: IterationState) -> UpstreamArguments:
    """Arguments of the run, as it would have them at this iteration in the captured layout."""
    args = copy.copy(run)
    args.world_size = layout.ranks
    args.data_parallel_size = layout.data
    args.tensor_model_parallel_size = layout.tensor
    args.pipeline_model_parallel_size = layout.pipeline
    args.context_parallel_size = layout.context
    args.expert_model_parallel_size = layout.expert
    args.expert_tensor_parallel_size = layout.expert_tensor
    args.num_distributed_optimizer_instances = layout.instances
    args.ckpt_format, args.dist_ckpt_optim_fully_reshardable = 'torch_dist', True
    if not args.group_query_attention:  # as upstream sets it when it makes the model
        args.num_query_groups = args.num_attention_heads
    iteration_state.restore_counters(state, args)
    return args


def _generators(
    states: Mapping[int, IterationState], placed: Mapping[int, Placed], of_each_replica: bool
) -> dict[str, ShardedObject]:
    """Generator states of the first data-parallel ranks, or of all if `of_each_replica`."""
    layout = placed[min(placed)].layout
    found: dict[tuple[int, int], list[dict[str, object]]] = {}
    for owner in _in_order(placed):
        seat = placed[owner].seat
        if seat.context == 0 and (of_each_replica or seat.data == 0):
            place = seat.pipeline, seat.tensor
            found.setdefault(place, []).append(_as_upstream(states[owner].rng))
    shape = layout.pipeline, layout.tensor
    return {
        f'{pipeline}.{tensor}': ShardedObject(_RANDOM, kept, shape, (pipeline, tensor))
        for (pipeline, tensor), kept in found.items()
    }


def _in_order(placed: Mapping[int, Placed]) -> Iterator[int]:
    yield from sorted(placed, key=lambda owner: placed[owner].seat.data)


def _as_upstream(state: RngState) -> dict[str, object]:
    """Upstream's form of generator states; leaves the generators of this process unchanged."""
    version, internal, gauss = state.python
    name, keys, position, has_gauss, cached = state.numpy
    return {
        'random_rng_state': (version, tuple(internal), gauss),
        'np_rng_state': (name, np.frombuffer(keys, np.uint32).copy(), position, has_gauss, cached),
        'torch_rng_state': state_tensor(state.torch),
        'cuda_rng_state': state_tensor(state.cuda or state.torch),
        'rng_tracker_states': {key: state_tensor(held) for key, held in state.tracker.items()},
    }
