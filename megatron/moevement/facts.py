# SPDX-License-Identifier: Apache-2.0
"""Properties of a job: those that stay constant while it runs, and its counters.

And the types of the objects that upstream builds. Upstream ships no type information, so these
names serve readers more than the type checker.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

__all__ = [
    'Built',
    'Chunks',
    'DistributedDataParallel',
    'MegatronOptimizer',
    'OptimizerParamScheduler',
    'TransformerConfig',
]

Chunks = list[DistributedDataParallel]
"""Model chunks of a rank: one, or several in an interleaved schedule."""

Built = tuple[Chunks, MegatronOptimizer, OptimizerParamScheduler]
"""Model chunks, optimizer and scheduler."""

UpstreamArguments = argparse.Namespace
"""Upstream's parsed arguments, before they are converted to `JobFacts` and `Settings`."""

Settings = Mapping[str, object]
"""All settings of the job, by the names of upstream's arguments; a custom loop
has fewer. For code that reads every setting, or reads settings by name."""


class Counters(Protocol):
    """Position of training; upstream's arguments have these attributes. Training thread only.

    Samples are those of all ranks.
    """

    iteration: int
    """Committed iterations."""
    curr_iteration: int
    """Copy of `iteration` that upstream's loop reads."""
    train_iters: int | None
    """Last iteration; upstream computes it from `--train-samples` during set-up."""
    consumed_train_samples: int
    consumed_valid_samples: int
    skipped_train_samples: int
    num_floating_point_operations_so_far: float
    do_train: int
    """1 if there is training data; set during set-up."""
    do_valid: int
    do_test: int


@dataclass(frozen=True)
class JobFacts:
    """One rank's view of the job; names are those of upstream's arguments.

    Fields with a default matter to upstream's trainer only.
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
    """Limit of a collective, and of the rendezvous of all ranks."""
    use_distributed_optimizer: bool
    micro_batch_size: int
    """Samples per micro-batch and data-parallel rank."""
    global_batch_size: int
    """Samples per iteration; the final size if the batch size grows."""
    seq_length: int
    """Tokens per sample."""
    hidden_size: int
    params_dtype: torch.dtype
    fp32_residual_connection: bool
    log_interval: int
    """Iterations between two lines about protection."""
    data_parallel_random_init: bool = False
    dataloader_type: str = 'single'
    data_sharding: bool = True
    """A cyclic loader shuffles a separate part of the data for each data-parallel rank."""
    load: str | None = None
    """Directory of the dense checkpoint to start from."""
    finetune: bool = False
    """Load only the weights of that checkpoint, and start at iteration 0."""
    ckpt_step: int | None = None
    """Iteration of that checkpoint; None: the newest."""
    save: str | None = None
    """Directory for dense checkpoints."""
    save_interval: int | None = None
    non_persistent_save_interval: int | None = None
    non_persistent_ckpt_type: str | None = None
    """`global`: dense checkpoints of which only the newest is kept have a separate directory."""
    non_persistent_global_ckpt_dir: str | None = None
    """That directory; None: a folder within `save`."""
    eval_interval: int | None = None
    start_eval_at_iter: int | None = None
    exit_interval: int | None = None
    copies_from_peers: bool = True
    """See `TrainingPlan`; in upstream's trainer these ranks draw the same random numbers."""

    @property
    def has_data_of_each_rank(self) -> bool:
        """True if the samples of an iteration depend on the number of data-parallel ranks."""
        return self.dataloader_type == 'cyclic' and self.data_sharding

    @property
    def boundary_dtype(self) -> torch.dtype:
        """Data type of the tensors sent between two stages."""
        return torch.float32 if self.fp32_residual_connection else self.params_dtype


def facts_of(args: UpstreamArguments) -> JobFacts:
    """Facts from upstream's arguments, after upstream has validated them."""
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    own = {'timeout', 'copies_from_peers'}
    names = {field.name for field in dataclasses.fields(JobFacts)} - own
    facts = JobFacts(timeout=timeout, **{name: getattr(args, name) for name in names})
    return dataclasses.replace(
        facts,
        global_batch_size=_largest_batch(args),
        # A flag of megatron-core 0.20: each data-parallel rank has a generator of its own.
        copies_from_peers=not getattr(args, 'mtp_hsm', False),
    )


def _largest_batch(args: UpstreamArguments) -> int:
    """Samples of the largest iteration; `global_batch_size` is the smallest while sizes grow."""
    constant: int = args.global_batch_size
    if args.step_batch_size_schedule is None:
        return constant
    steps = StepBatchsizeNumMicroBatchesCalculator._parse_schedule(
        args.step_batch_size_schedule, args.seq_length
    )
    return max(int(batch) for _, batch in steps)
