# SPDX-License-Identifier: Apache-2.0
"""Chooses one of several layouts by the number of ranks and by memory.

`--sparse-ckpt-elastic-layouts` is evaluated before upstream parses the command line: the flags of
the chosen layout are appended, and the last value of a flag counts.

The minimum memory of a layout on a device and on a node is computed before any allocation.
Parameters are counted by upstream's own arithmetic, windows by that of `memory.budget`. Activations
are not counted, nor windows of more than one iteration, which `auto` chooses only if there is
space. The arithmetic assumes 16-bit weights and 32-bit optimizer state; no other job is refused.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.training.arguments import parse_args
from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

from moevement_ext.config import ConfigurationError
from moevement_ext.config_file import value_of
from moevement_ext.memory.budget import rank_memory, window_file_bytes
from moevement_ext.memory.file_system import GIB, existing_parent, gib

FLAG = '--sparse-ckpt-elastic-layouts'
_FLAGS = {
    'pp': '--pipeline-model-parallel-size',
    'ep': '--expert-model-parallel-size',
    'cp': '--context-parallel-size',
    'instances': '--num-distributed-optimizer-instances',
}
_ETP = 'etp'
_ETP_FLAG = '--expert-tensor-parallel-size'
_UNEVEN = (
    '--pipeline-model-parallel-layout',
    '--decoder-first-pipeline-num-layers',
    '--decoder-last-pipeline-num-layers',
    '--account-for-embedding-in-pipeline-split',
    '--account-for-loss-in-pipeline-split',
)

AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
TooLittle = Callable[[Sequence[str], int], str | None]

# A refusal names a number of ranks up to so many times that of the start.
_MOST = 8
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


@dataclass(frozen=True)
class LayoutSizes:
    """Sizes that decide whether a layout fits a number of ranks."""

    tensor: int = 1
    expert_tensor: int | None = None
    pp: int = 1
    ep: int = 1
    cp: int = 1
    instances: int = 1
    layers: int = 0
    """0: stages may have different numbers of layers."""
    experts: int | None = None
    micro_batch: int = 1
    global_batch: int | None = None

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in _FLAGS}
        if self.expert_tensor is not None:
            sizes[_ETP] = self.expert_tensor
        return ','.join(f'{name}={size}' for name, size in sizes.items())

    def misfit(self, ranks: int) -> str | None:
        """Reason why `ranks` ranks cannot have this layout; None if they can."""
        stage = self.tensor * self.cp * self.pp
        experts = (self.expert_tensor or self.tensor) * self.ep * self.pp
        data = ranks // stage
        whole = self.global_batch or self.micro_batch * data
        for what, number, by in (
            ('ranks', ranks, stage),
            ('ranks', ranks, experts),
            ('layers', self.layers, self.pp),
            ('experts', self.experts or self.ep, self.ep),
            ('data-parallel ranks', data * self.cp, self.instances),
            ('data-parallel ranks of experts', ranks // experts, self.instances),
            ('samples of a batch', whole, self.micro_batch * max(data, 1)),
        ):
            if number % by:
                return f'{number} {what} are not divisible by {by}'
        return None


def fitted(
    arguments: Sequence[str], ranks: int, too_little: TooLittle, node_ranks: int = 1
) -> list[str]:
    """Flags to append to the command line, so that all ranks have a place in a layout.

    The layout of the flags comes first. `too_little` returns why a layout that fits the number of
    ranks has too little memory (`too_little`); `node_ranks` is the number of ranks of a node.

    Raises:
        ConfigurationError: no layout fits; the message has the reason for each, and the nearest
            number of ranks that one fits.
    """
    own, fallbacks = _of(arguments)
    if not fallbacks:
        return []
    layouts: list[tuple[LayoutSizes, list[str]]] = [(own, [])]
    for text in filter(None, fallbacks.split(';')):
        layout = _changed(own, text)
        layouts.append((layout, _flags(layout)))

    def misfit(layout: LayoutSizes, flags: Sequence[str], number: int) -> str | None:
        return layout.misfit(number) or too_little([*arguments, *flags], number)

    reasons: dict[str, str] = {}
    for layout, flags in layouts:
        reason = misfit(layout, flags, ranks)
        if reason is None:
            return flags
        reasons[str(layout)] = reason
    step = node_ranks if ranks > node_ranks and ranks % node_ranks == 0 else 1
    numbers = [*range(ranks - step, 0, -step), *range(ranks + step, _MOST * ranks + 1, step)]
    fit = next((one for one in numbers if not all(misfit(*each, one) for each in layouts)), None)
    other = 'another number of' if fit is None else str(fit)
    nodes = f' ({fit // step} nodes)' if fit and step > 1 else ''
    raise ConfigurationError(
        f'{FLAG}: no layout has a place for each of {ranks} ranks: '
        f'{"; ".join(f"{layout}: {reason}" for layout, reason in reasons.items())}. '
        f'Start {other} ranks{nodes}, or list a layout for {ranks}.'
    )


def _changed(own: LayoutSizes, text: str) -> LayoutSizes:
    """Parse a layout, e.g. `pp=2,ep=4`; omitted sizes are 1, an omitted ETP is that of `own`."""
    found, known = dict.fromkeys(_FLAGS, 1), [*_FLAGS, _ETP]
    for item in text.split(','):
        name, _, size = item.strip().partition('=')
        if name not in known or not size.isdecimal() or int(size) < 1:
            raise ConfigurationError(
                f'{FLAG} {text!r}: give sizes of {", ".join(known)}, e.g. "pp=2,ep=4;ep=4".'
            )
        found['expert_tensor' if name == _ETP else name] = int(size)
    return replace(own, **found)


def _flags(layout: LayoutSizes) -> list[str]:
    given = [item for name, flag in _FLAGS.items() for item in (flag, str(getattr(layout, name)))]
    if layout.expert_tensor is not None:
        given += [_ETP_FLAG, str(layout.expert_tensor)]
    return given


def _of(arguments: Sequence[str]) -> tuple[LayoutSizes, str]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(FLAG, default=value_of(arguments, FLAG) or '', dest='fallbacks')
    for name, flag in (
        ('tensor', '--tensor-model-parallel-size'),
        ('expert_tensor', _ETP_FLAG),
        *_FLAGS.items(),
        ('layers', '--num-layers'),
        ('experts', '--num-experts'),
        ('micro_batch', '--micro-batch-size'),
        ('global_batch', '--global-batch-size'),
    ):
        parser.add_argument(flag, type=int, dest=name, default=argparse.SUPPRESS)
    try:
        given, _ = parser.parse_known_args(arguments)
    except argparse.ArgumentError:  # upstream's parser reports it better
        return LayoutSizes(), ''
    found = vars(given)
    fallbacks = found.pop('fallbacks')
    if any(argument.partition('=')[0] in _UNEVEN for argument in arguments):
        found.pop('layers', None)
    return LayoutSizes(**found), fallbacks


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
    directory = existing_parent(Path(args.sparse_ckpt_dir))
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
