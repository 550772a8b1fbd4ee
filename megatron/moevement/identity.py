# SPDX-License-Identifier: Apache-2.0
"""What makes two launches the same run: windows of another run or layout are refused by name."""

import os
from typing import Any

import msgspec
import xxhash

from moevement_ext.config import SparseCheckpointConfig

# Flags that decide which bits training computes. Paths, logging, intervals and host settings do
# not count, so that a job may be launched again with other ones.
_TRAINING = (
    'num_layers', 'hidden_size', 'ffn_hidden_size', 'num_attention_heads', 'num_query_groups',
    'kv_channels', 'seq_length', 'max_position_embeddings', 'position_embedding_type',
    'normalization', 'swiglu', 'num_experts', 'num_moe_experts', 'vocab_size', 'padded_vocab_size',
    'untie_embeddings_and_output_weights', 'add_bias_linear', 'hidden_dropout',
    'attention_dropout', 'data_path', 'train_data_path', 'split', 'mock_data', 'tokenizer_type',
    'seed', 'micro_batch_size', 'global_batch_size', 'rampup_batch_size', 'dataloader_type',
    'optimizer', 'lr', 'min_lr', 'lr_decay_style', 'lr_decay_iters', 'lr_warmup_iters',
    'lr_warmup_fraction', 'weight_decay', 'start_weight_decay', 'end_weight_decay', 'clip_grad',
    'adam_beta1', 'adam_beta2', 'adam_eps', 'bf16', 'fp16', 'params_dtype', 'transformer_impl',
    'use_distributed_optimizer', 'calculate_per_token_loss', 'deterministic_mode',
)  # fmt: skip
_LAYOUT = (
    'world_size', 'tensor_model_parallel_size', 'pipeline_model_parallel_size',
    'virtual_pipeline_model_parallel_size', 'expert_model_parallel_size',
    'expert_tensor_parallel_size', 'context_parallel_size', 'sequence_parallel',
    'num_distributed_optimizer_instances', 'use_tp_pp_dp_mapping',
)  # fmt: skip


def run_identity(args: Any, run_id: str) -> str:
    """Digest of the run id and of the flags that decide which bits training computes."""
    moe = sorted(name for name in vars(args) if name.startswith('moe_'))
    return _digest([run_id, *(_flag(args, name) for name in (*_TRAINING, *moe))])


def topology_identity(args: Any) -> str:
    """Digest of the parallel layout."""
    return _digest([_flag(args, name) for name in _LAYOUT])


def run_name(args: Any, config: SparseCheckpointConfig) -> str:
    """Directory name of the run: as given, else Slurm's job id, else a digest of the flags."""
    if config.run_id is not None:
        return config.run_id
    if 'SLURM_JOB_ID' in os.environ:
        return f'slurm-{os.environ["SLURM_JOB_ID"]}'
    return f'run-{run_identity(args, "")}'


def _flag(args: Any, name: str) -> str:
    return f'{name}={getattr(args, name, None)}'


def _digest(parts: list[str]) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(parts))
