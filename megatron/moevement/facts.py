# SPDX-License-Identifier: Apache-2.0
"""What the adapter needs to know of a job, and what does not change while it runs.

Checked against megatron-core 0.19.2.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

UpstreamArguments = argparse.Namespace
"""Upstream's parsed arguments, between the command line and what follows from them."""

Settings = Mapping[str, object]
"""All settings of the job, under the names that upstream's arguments have; the configurations of a
loop of one's own have fewer. For what reads every one of them, or asks for them by name."""


@dataclass(frozen=True)
class JobFacts:
    """One rank's view of the job; names are those of upstream's arguments.

    What has a default is asked of upstream's trainer only, and another loop does not do it.
    """

    rank: int
    world_size: int
    data_parallel_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    context_parallel_size: int
    sequence_parallel: bool
    distributed_backend: str
    """Backend of `torch.distributed`: gloo or nccl."""
    timeout: timedelta
    """How long a collective may take, and all ranks to meet."""
    use_distributed_optimizer: bool
    micro_batch_size: int
    """Samples per micro-batch and data-parallel rank."""
    global_batch_size: int
    """Samples per iteration; the most of them if it grows."""
    seq_length: int
    """Tokens per sample."""
    hidden_size: int
    params_dtype: torch.dtype
    fp32_residual_connection: bool
    log_interval: int
    """Iterations between two lines about protection."""
    data_parallel_random_init: bool = False
    dataloader_type: str = 'single'
    load: str | None = None
    """Directory of the dense checkpoint to begin with."""
    finetune: bool = False
    """Take the weights of that checkpoint only, and begin at iteration 0."""
    ckpt_step: int | None = None
    """Iteration of that checkpoint, if it is not to be the newest."""
    save: str | None = None
    """Directory for dense checkpoints."""
    save_interval: int | None = None
    non_persistent_save_interval: int | None = None
    non_persistent_ckpt_type: str | None = None
    """`global`: of dense checkpoints that are not kept, the newest is in a directory of its own."""
    non_persistent_global_ckpt_dir: str | None = None
    """That directory, if it is not one within the others."""
    eval_interval: int | None = None
    start_eval_at_iter: int | None = None
    exit_interval: int | None = None

    @property
    def boundary_dtype(self) -> torch.dtype:
        """Type of the tensors that pass between two stages."""
        return torch.float32 if self.fp32_residual_connection else self.params_dtype


def facts_of(args: UpstreamArguments) -> JobFacts:
    """The facts in upstream's arguments, once it has validated them."""
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    names = {field.name for field in dataclasses.fields(JobFacts)} - {'timeout'}
    facts = JobFacts(timeout=timeout, **{name: getattr(args, name) for name in names})
    return dataclasses.replace(facts, global_batch_size=_largest_batch(args))


def _largest_batch(args: UpstreamArguments) -> int:
    """Samples of the largest iteration; while they grow, upstream keeps those of the smallest."""
    constant: int = args.global_batch_size
    if args.step_batch_size_schedule is None:
        return constant
    steps = StepBatchsizeNumMicroBatchesCalculator._parse_schedule(
        args.step_batch_size_schedule, args.seq_length
    )
    return max(int(batch) for _, batch in steps)
