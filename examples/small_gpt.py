# SPDX-License-Identifier: Apache-2.0
"""A small GPT with a Mixture of Experts in bf16, one pipeline stage per rank, on text as bytes.

An ordinary Megatron-Core program; `own_loop.py` protects it.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.moevement.seams import cpu_device

if cpu_device.needed():
    cpu_device.install()

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron.moevement import TrainingPlan

if cpu_device.needed():
    cpu_device.patch_upstream()

BACKEND = 'gloo' if cpu_device.needed() else 'nccl'
SEQUENCE = 32
_VOCABULARY = 512  # bytes, and the end of a document
_SEED = 1234

Batches = Iterator[torch.Tensor]


def configurations(
    stages: int,
) -> tuple[TransformerConfig, OptimizerConfig, DistributedDataParallelConfig]:
    config = TransformerConfig(
        num_layers=2 * stages,
        hidden_size=32,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.01,
        add_bias_linear=False,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        pipeline_model_parallel_size=stages,
        finalize_model_grads_func=finalize_model_grads,
    )
    optimizer = OptimizerConfig(
        optimizer='adam',
        lr=1e-3,
        min_lr=1e-4,
        bf16=True,
        clip_grad=1.0,
        use_distributed_optimizer=True,
    )
    return config, optimizer, DistributedDataParallelConfig(use_distributed_optimizer=True)


def build(
    config: TransformerConfig,
    optimizer_config: OptimizerConfig,
    ddp_config: DistributedDataParallelConfig,
) -> tuple[list[Any], Any, OptimizerParamScheduler]:
    """Create model-parallel groups, and this rank's model chunks, optimizer and scheduler."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        create_gloo_process_groups=cpu_device.needed(),
    )
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)
    model_parallel_cuda_manual_seed(_SEED)
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
        vocab_size=_VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).cuda()
    model = [DistributedDataParallel(config, ddp_config, Float16Module(config, gpt))]
    optimizer = get_megatron_optimizer(optimizer_config, model)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-4,
        lr_warmup_steps=32,
        lr_decay_steps=3200,
        lr_decay_style='cosine',
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=1,
        wd_incr_style='constant',
    )
    return model, optimizer, scheduler


def train_step(
    built: tuple[list[Any], Any, OptimizerParamScheduler],
    plan: TrainingPlan,
    data: Batches,
    **schedule: Any,
) -> float | None:
    """Run one iteration; returns the mean loss on the last stage, None on the others."""
    model, optimizer, scheduler = built
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=plan.global_batch_size // plan.micro_batch_size,
        seq_length=plan.seq_length,
        micro_batch_size=plan.micro_batch_size,
        forward_only=False,
        **schedule,
    )
    successful, _, _ = optimizer.step()
    if successful:
        scheduler.step(increment=plan.global_batch_size)
    return float(torch.stack([loss['lm loss'] for loss in losses]).mean()) if losses else None


def forward_step(data: Batches, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run one micro-batch through the layers of this stage."""
    tokens = next(data)
    positions = torch.arange(SEQUENCE).expand(len(tokens), -1).cuda()
    future = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1).cuda()
    output = model(tokens[:, :-1], positions, future, labels=tokens[:, 1:])
    return output, mean_loss


def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of a micro-batch (a scalar), and a copy to report, by name."""
    loss = output.float().mean()
    return loss, {'lm loss': loss.detach().clone()}  # Megatron divides the first one in place


def batches(prefix: Path, plan: TrainingPlan, consumed_samples: int) -> Batches:
    """Endless micro-batches [micro batch, sequence + 1] of this rank's share of the text."""
    index = IndexedDataset(str(prefix)).index
    text = np.memmap(f'{prefix}.bin', dtype=index.dtype, mode='r')
    samples = (len(text) - 1) // plan.seq_length
    rank = parallel_state.get_data_parallel_rank()
    step = plan.micro_batch_size * parallel_state.get_data_parallel_world_size()
    while True:
        first = consumed_samples + rank * plan.micro_batch_size
        starts = [
            n % samples * plan.seq_length for n in range(first, first + plan.micro_batch_size)
        ]
        rows = np.stack([text[start : start + plan.seq_length + 1] for start in starts])
        yield torch.from_numpy(rows.astype(np.int64)).cuda()
        consumed_samples += step
