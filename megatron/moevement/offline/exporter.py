# SPDX-License-Identifier: Apache-2.0
"""Writes an upstream checkpoint from one dense slot of all owners, in this process.

It is saved as the run itself would have saved it, in its own layout. All that upstream saves
besides tensors also comes from the windows: the arguments with the sizes of the run's layout, and
the generator states of each of its stages and tensor-parallel ranks, so that a job in the same
layout continues with the same random numbers.
"""

import contextlib
import copy
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.utils import get_model_config
from megatron.training import checkpointing
from megatron.training import training as upstream
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.global_vars import set_global_variables

from megatron.moevement.checking import in_words
from megatron.moevement.facts import Built, Counters, UpstreamArguments
from megatron.moevement.offline import run_flags
from megatron.moevement.offline.filling import DenseSlot, fill
from megatron.moevement.seams import patches
from megatron.moevement.state import iteration_state
from megatron.moevement.state.global_scalars import reduced_by
from megatron.moevement.state.iteration_state import IterationState, RngState
from megatron.moevement.state.resharded_state import Streams, resharded
from megatron.moevement.state.training_state import TrainingState
from moevement_ext.capture.trainer_state import state_tensor
from moevement_ext.errors import UserError
from moevement_ext.memory.window.settings import Layout, Placed
from moevement_ext.memory.window.slot import decode_context


def export(slot: DenseSlot, flags: Sequence[str], output: Path) -> int:
    """Save a checkpoint that any layout can load; returns its iteration. Once in a process.

    `flags` are all flags of `pretrain_gpt.py`, in the run's layout or another one; `output` is
    a directory for upstream's `--load`.

    Raises:
        UserError: the flags belong to another training, or upstream refuses them.
        RefusedWindow: a tensor is missing or damaged.
    """
    header = slot.headers[min(slot.headers)]
    run = run_flags.of_training(flags, header)
    args = run_flags.for_one_rank(flags, run, output)
    states = {
        owner: iteration_state.decode(decode_context(header.context).state)
        for owner, header in slot.headers.items()
    }
    try:
        built = _build(args, experts_apart=run.expert_model_parallel_size > 1)
    except Exception as error:  # upstream asks for a GPU, or for Transformer Engine
        raise UserError(f'this model cannot be built on a CPU: {in_words(error)}') from error
    try:
        model, optimizer, scheduler = built
        training = TrainingState(model, optimizer, scheduler)
        state, step = _for_this_rank(states, training, args)
        shared = not run.untie_embeddings_and_output_weights
        fill(slot, training, shared, step)
        training.restore(state, args)
        _save(built, run, states, slot.placed)
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    return state.iteration


def _build(args: UpstreamArguments, experts_apart: bool) -> Built:
    """Build the whole model for one rank on this process. Once in a process.

    With `experts_apart`, experts get a separate optimizer, as in layouts with several
    expert-parallel ranks: upstream's loader needs as many optimizers as were saved.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        set_global_variables(args, build_tokenizer=False)
        config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        if experts_apart:  # the groups have one rank all the same
            config.model.transformer.expert_model_parallel_size = 2
        upstream.initialize_megatron(allow_no_cuda=True, store=torch.distributed.HashStore())
        built: Built = upstream.setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            cfg_container=config,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        return built


def _for_this_rank(
    states: Mapping[int, IterationState], training: TrainingState, counters: Counters
) -> tuple[IterationState, int | None]:
    """Auxiliary state of the rank, and steps of its parameters if the run counted by group.

    The generators of this process stay as they are: no random number is drawn, and the owners'
    generator states are saved.
    """
    built = iteration_state.capture(
        counters, 0, training.optimizer, training.scheduler, states[min(states)].scalars, 0.0
    )
    experts = get_expert_parallel_rng_tracker_name()
    reduced = reduced_by(training.optimizer, get_model_config(training.model[0]))
    state = resharded(states, Streams(None, None), experts, built, reduced)
    step = max((step for step in state.group_steps if step is not None), default=None)
    return msgspec.structs.replace(state, group_steps=built.group_steps), step


_RANDOM = 'rng_state'


def _save(
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
    for owner in sorted(placed, key=lambda owner: placed[owner].seat.data):
        seat = placed[owner].seat
        if seat.context == 0 and (of_each_replica or seat.data == 0):
            place = seat.pipeline, seat.tensor
            found.setdefault(place, []).append(_as_upstream(states[owner].rng))
    shape = layout.pipeline, layout.tensor
    return {
        f'{pipeline}.{tensor}': ShardedObject(_RANDOM, kept, shape, (pipeline, tensor))
        for (pipeline, tensor), kept in found.items()
    }


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
