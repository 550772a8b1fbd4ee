# SPDX-License-Identifier: Apache-2.0
"""Minimum memory of a layout on a device and on a node, computed before any allocation.

Parameters are counted by upstream's own arithmetic, windows by that of `memory.budget`. Activations
are not counted, nor windows of more than one iteration, which `auto` chooses only if there is
space. The arithmetic assumes 16-bit weights and 32-bit optimizer state; no other job is refused.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.training.arguments import parse_args
from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

from moevement_ext.memory.budget import rank_memory, window_file_bytes
from moevement_ext.memory.file_system import GIB, gib

AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]

_WEIGHT_AND_GRADIENT_BYTES = 6
_ALL_BYTES = 18  # with masters and two moments
# Flags with which a device may hold fewer bytes.
_LESS = (
    'use_precision_aware_optimizer',
    'optimizer_cpu_offload',
    'use_megatron_fsdp',
    'use_torch_fsdp2',
    'sparse_ckpt_fp8_masters',
)


class NodeCapacity(NamedTuple):
    """Capacity of this node. Nodes are assumed equal: all ranks must choose the same layout."""

    ranks: int
    """Number of the job's ranks on this node."""
    device_bytes: int | None
    """Memory of a device; None: the job runs on the CPU."""

    @classmethod
    def here(cls) -> 'NodeCapacity':
        """This node, from the launcher's environment variables."""
        device = None
        if torch.cuda.is_available():
            place = int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()
            device = torch.cuda.get_device_properties(place).total_memory
        return cls(int(os.environ.get('LOCAL_WORLD_SIZE', '1')), device)


def too_little(
    arguments: Sequence[str], ranks: int, node: NodeCapacity, add_arguments: AddArguments
) -> str | None:
    """Reason why a layout has too little memory, with the bytes; None if it may have enough."""
    args = _parsed(arguments, add_arguments)
    if None in (args.num_layers, args.hidden_size, args.num_attention_heads):
        return None  # upstream refuses the flags, or reads the sizes from elsewhere
    if not (args.bf16 or args.fp16) or any(getattr(args, name, False) for name in _LESS):
        return None
    device, state = _bytes_of_rank(args, ranks)
    if node.device_bytes is not None and device > node.device_bytes:
        return (
            f'weights, gradients and optimizer state take {gib(device)} of a device, which has '
            f'{gib(node.device_bytes)}'
        )
    file = window_file_bytes(state, 1)
    nodes = -(-ranks // node.ranks)
    replicas = [file] * min(args.sparse_ckpt_replicas, nodes - 1)
    needed = node.ranks * rank_memory(file, replicas, 0, bool(args.sparse_ckpt_disk)).total
    available, where = _host_memory(args)
    if needed > available:
        return (
            f'windows of one iteration take {gib(needed)} of the host memory of a node; '
            f'{where} {gib(available)}'
        )
    return None


def _bytes_of_rank(args: argparse.Namespace, ranks: int) -> tuple[int, int]:
    """Bytes on the device of the fullest rank, and the part of them that its windows hold."""
    _complete(args, ranks)
    total = compute_weight_and_optimizer_memory(args)
    sharded, args.use_distributed_optimizer = args.use_distributed_optimizer, False
    parameters = compute_weight_and_optimizer_memory(args) / _ALL_BYTES
    args.use_distributed_optimizer = sharded
    return int(total), int(total - _WEIGHT_AND_GRADIENT_BYTES * parameters)


def _complete(args: argparse.Namespace, ranks: int) -> None:
    """Set values that upstream's checks would derive; each instance shards the optimizer itself."""
    instances = args.num_distributed_optimizer_instances
    stages = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    args.world_size = ranks // instances
    args.data_parallel_size = max(args.world_size // stages, 1)  # context-parallel ranks shard, too
    args.expert_tensor_parallel_size = (
        args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    )
    args.kv_channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    if args.ffn_hidden_size is None:
        wide = 4 * args.hidden_size
        args.ffn_hidden_size = int(wide * 2 / 3 / 64) * 64 if args.swiglu else wide
    args.moe_ffn_hidden_size = args.moe_ffn_hidden_size or args.ffn_hidden_size
    unit = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-(args.vocab_size or 0) // unit) * unit


def _host_memory(args: argparse.Namespace) -> tuple[int, str]:
    """Bytes for windows on a node, and what limits them."""
    if args.sparse_ckpt_host_memory_gb is not None:
        return int(args.sparse_ckpt_host_memory_gb * GIB), '--sparse-ckpt-host-memory-gb gives'
    directory = Path(args.sparse_ckpt_dir)
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).total, f'{directory} has'


def _parsed(arguments: Sequence[str], add_arguments: AddArguments) -> argparse.Namespace:
    """Parse a command line as upstream does, which takes it from `sys.argv`."""
    given = sys.argv
    sys.argv = [given[0], *arguments]
    try:
        args: argparse.Namespace = parse_args(add_arguments)
        return args
    finally:
        sys.argv = given
