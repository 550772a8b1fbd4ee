# SPDX-License-Identifier: Apache-2.0
"""Writes an upstream checkpoint from one dense slot of all owners, in this process."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.utils import get_model_config
from megatron.training import training as upstream
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.global_vars import set_global_variables

from megatron.moevement.built import Built
from megatron.moevement.checking import told
from megatron.moevement.facts import Counters, UpstreamArguments
from megatron.moevement.offline import run_flags, saving
from megatron.moevement.offline.filling import DenseSlot, fill
from megatron.moevement.state import iteration_state
from megatron.moevement.state.global_scalars import reduced_by
from megatron.moevement.state.iteration_state import IterationState
from megatron.moevement.state.resharded_state import Streams, resharded
from megatron.moevement.state.training_state import TrainingState
from moevement_ext.errors import UserError
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
        raise UserError(f'this model cannot be built on a CPU: {told(error)}') from error
    try:
        model, optimizer, scheduler = built
        training = TrainingState(model, optimizer, scheduler)
        state, step = _for_this_rank(states, training, args)
        shared = not run.untie_embeddings_and_output_weights
        fill(slot, training, shared, step)
        training.restore(state, args)
        saving.save(built, run, states, slot.placed)
    finally:
        _close()
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


def _close() -> None:
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


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
