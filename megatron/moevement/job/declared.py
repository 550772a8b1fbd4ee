# SPDX-License-Identifier: Apache-2.0
"""The plan of a custom loop; job facts and settings from it and from the configurations."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron.moevement.facts import JobFacts, Settings
from megatron.moevement.job.identity import ARGUMENTS
from moevement_ext.config import ConfigurationError, documented_by_field, setting

_BACKENDS = ('nccl', 'gloo')


@documented_by_field
@dataclass(frozen=True)
class TrainingPlan:
    """Parameters of training that the configurations of Megatron-Core do not have."""

    train_iters: int = field(metadata={'help': 'Iterations at which training ends.'})
    seq_length: int = field(metadata={'help': 'Tokens per sample; the maximum if lengths differ.'})
    micro_batch_size: int = field(
        metadata={'help': 'Samples per micro-batch and data-parallel rank.'}
    )
    global_batch_size: int = field(
        metadata={'help': 'Samples per iteration, the same in all iterations.'}
    )
    backend: str = setting('nccl')("""Backend of `torch.distributed`: nccl, or gloo on machines
    without a GPU.""")
    timeout: timedelta = setting(timedelta(minutes=10))("""Limit of a collective, and of the
    rendezvous of all ranks.""")
    log_interval: int = setting(100)("""Iterations between two lines about protection on the last
    rank's standard output.""")
    copies_from_peers: bool = setting(False)("""Ranks with the same state (data parallelism without
    the distributed optimizer) also draw the same random numbers, independently of their data: a
    lost rank copies another rank's state. Otherwise its stage replays.""")

    def __post_init__(self) -> None:
        for name in ('seq_length', 'micro_batch_size', 'global_batch_size', 'log_interval'):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f'TrainingPlan.{name} {getattr(self, name)} must be at least 1.'
                )
        if self.backend not in _BACKENDS:
            raise ConfigurationError(
                f'TrainingPlan.backend {self.backend!r} must be nccl, or gloo without a GPU.'
            )


def refuse_mixed_up_sends(model: TransformerConfig) -> None:
    """Apply a rule of upstream's trainer that upstream's schedules do not check.

    In a batch, two sends between the same pair of ranks are mixed up: training would continue with
    swapped tensors. A replay assigns the tensors correctly, and would compute another state.
    """
    interleaved = (model.virtual_pipeline_model_parallel_size or 1) > 1
    if interleaved and model.pipeline_model_parallel_size == 2 and not model.overlap_p2p_comm:
        raise ConfigurationError(
            'TransformerConfig has interleaved stages on two pipeline ranks, which exchange wrong '
            'tensors in batches; set overlap_p2p_comm=True and batch_p2p_comm=False, or use more '
            'pipeline ranks.'
        )


def refuse_recorded_passes(model: TransformerConfig) -> None:
    """Refuse CUDA graphs in a custom loop, which might record a graph before recovery replays.

    A graph recorded with frozen operators would never update their weights. (Upstream's trainer
    records after the replay.)
    """
    if model.cuda_graph_impl != 'none':
        raise ConfigurationError(
            f'TransformerConfig.cuda_graph_impl {model.cuda_graph_impl!r}: a loop of your own may '
            "record passes before a recovery replays; set cuda_graph_impl='none'."
        )


def facts_of_loop(
    model: TransformerConfig, optimizer: OptimizerConfig, plan: TrainingPlan
) -> JobFacts:
    """Job facts from the configurations and the launcher's environment variables."""
    world_size = int(os.environ.get('WORLD_SIZE', 1))
    shards = (
        model.tensor_model_parallel_size
        * model.pipeline_model_parallel_size
        * model.context_parallel_size
    )
    data_parallel_size = world_size // shards
    samples = plan.micro_batch_size * data_parallel_size
    if world_size % shards or plan.global_batch_size % samples:
        raise ConfigurationError(
            f'TrainingPlan.global_batch_size {plan.global_batch_size} must be a multiple of '
            f'micro_batch_size x data-parallel ranks, and WORLD_SIZE {world_size} one of the '
            f'{shards} ranks of a model replica.'
        )
    return JobFacts(
        rank=int(os.environ.get('RANK', 0)),
        world_size=world_size,
        data_parallel_size=data_parallel_size,
        tensor_model_parallel_size=model.tensor_model_parallel_size,
        pipeline_model_parallel_size=model.pipeline_model_parallel_size,
        context_parallel_size=model.context_parallel_size,
        sequence_parallel=model.sequence_parallel,
        distributed_backend=plan.backend,
        timeout=plan.timeout,
        use_distributed_optimizer=optimizer.use_distributed_optimizer,
        micro_batch_size=plan.micro_batch_size,
        global_batch_size=plan.global_batch_size,
        seq_length=plan.seq_length,
        hidden_size=model.hidden_size,
        params_dtype=model.pipeline_dtype or model.params_dtype,
        fp32_residual_connection=model.fp32_residual_connection,
        log_interval=plan.log_interval,
        copies_from_peers=plan.copies_from_peers,
    )


def settings_of_loop(
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    ddp: DistributedDataParallelConfig,
    plan: TrainingPlan,
    facts: JobFacts,
    of_loop: Mapping[str, object],
) -> Settings:
    """All settings that may change bits, by the names of upstream's arguments.

    `of_loop` holds further settings that the program declares.
    """
    found = {**vars(ddp), **vars(optimizer), **vars(model), **vars(plan), **vars(facts)}
    del found['copies_from_peers']  # decides only how a rank recovers
    named = {f'settings.{name}': str(value) for name, value in of_loop.items()}
    return {**found, **named, ARGUMENTS: _arguments()}


def _arguments() -> dict[str, str]:
    """The program's arguments by flag; only the program knows which of them decide bits."""
    found, flag = dict[str, str](), 'arguments'
    for word in sys.argv[1:]:
        if word.startswith('--'):
            flag, _, word = word.partition('=')
        found[flag] = f'{found.get(flag, "")} {word}'.strip()
    return found
