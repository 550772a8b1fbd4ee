# SPDX-License-Identifier: Apache-2.0
"""Upstream's model, optimizer and schedule on a single rank of this process, without data."""

import contextlib
import io

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import training
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.global_vars import set_global_variables

from megatron.moevement.built import Built
from megatron.moevement.facts import UpstreamArguments


def build(args: UpstreamArguments, experts_apart: bool) -> Built:
    """Build the whole model for one rank on this process. Once in a process.

    With `experts_apart`, experts get an optimizer of their own, as in layouts with several
    expert-parallel ranks: upstream's loader needs as many optimizers as were saved.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        set_global_variables(args, build_tokenizer=False)
        config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        if experts_apart:  # the groups have one rank all the same
            config.model.transformer.expert_model_parallel_size = 2
        training.initialize_megatron(allow_no_cuda=True, store=torch.distributed.HashStore())
        built: Built = training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            cfg_container=config,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        return built


def close() -> None:
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
