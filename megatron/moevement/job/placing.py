# SPDX-License-Identifier: Apache-2.0
"""The parallel layout of a job, and the place of a rank in it, from the settings alone.

Follows upstream's `RankGenerator`: tensor-parallel ranks are adjacent, then those of context and
data parallelism (or of experts and their replicas), then stages; with `--use-tp-pp-dp-mapping`
stages come before data parallelism.
"""

from typing import Any

from megatron.moevement.facts import Settings
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.settings import Layout, Seat

_STAGES = (
    'pipeline_model_parallel_layout num_layers_in_first_pipeline_stage '
    'num_layers_in_last_pipeline_stage decoder_first_pipeline_num_layers '
    'decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split '
    'account_for_loss_in_pipeline_split'
).split()


def layout_of(settings: Settings) -> Layout | None:
    """Sizes of the parallel groups; None for layouts that these numbers do not describe."""
    ranks, tensor = _size(settings, 'world_size'), _size(settings, 'tensor_model_parallel_size')
    pipeline = _size(settings, 'pipeline_model_parallel_size')
    context = _size(settings, 'context_parallel_size')
    given = settings.get('expert_tensor_parallel_size')
    expert_tensor = tensor if given is None else _size(settings, 'expert_tensor_parallel_size')
    if _splits_further(settings, '', tensor) or _splits_further(settings, 'expert_', expert_tensor):
        return None
    return Layout(
        ranks=ranks,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        chunks=_size(settings, 'virtual_pipeline_model_parallel_size'),
        data=ranks // (tensor * pipeline * context),
        expert=_size(settings, 'expert_model_parallel_size'),
        expert_tensor=expert_tensor,
        instances=_size(settings, 'num_distributed_optimizer_instances'),
        sharded=bool(settings.get('use_distributed_optimizer')),
        stages=', '.join(
            f'{name} {settings[name]}'
            for name in _STAGES
            if settings.get(name) not in (None, False)
        ),
    )


def seat_of(rank: int, layout: Layout, stages_before_data: bool = False) -> Seat:
    """Place of a rank; `stages_before_data`: `--use-tp-pp-dp-mapping`."""
    copies = layout.ranks // (layout.expert_tensor * layout.expert * layout.pipeline)
    dense = [layout.tensor, layout.context, layout.data, layout.pipeline]
    experts = [layout.expert_tensor, layout.expert, copies, layout.pipeline]
    if stages_before_data:
        dense, experts = ([*sizes[:2], sizes[3], sizes[2]] for sizes in (dense, experts))
    tensor, context, *rest = _digits(rank, dense)
    expert_tensor, expert, *rest_of_experts = _digits(rank, experts)
    if stages_before_data:
        rest, rest_of_experts = rest[::-1], rest_of_experts[::-1]
    return Seat(
        tensor=tensor,
        context=context,
        pipeline=rest[1],
        data=rest[0],
        expert=expert,
        expert_tensor=expert_tensor,
        expert_data=rest_of_experts[0],
    )


def refuse(was: Layout, now: Layout, interleaved: bool, own_data: bool) -> None:
    """Refuse a change of the layout that ranges cannot describe, or that divides data differently.

    Args:
        was: layout of the windows.
        now: layout of this job.
        interleaved: the rows of gated experts are mixed (`--moe-mlp-glu-interleave-size`).
        own_data: each data-parallel rank shuffles a part of the data (`--dataloader-type cyclic`).

    Raises:
        RefusedWindow: the layout `now` cannot resume from windows of `was`.
    """
    flag = '--tensor-model-parallel-size'
    if was.tensor != now.tensor:
        raise RefusedWindow(
            f'windows of {was} are divided by {flag} {was.tensor}, and this job by {now.tensor}: '
            f'start with {flag} {was.tensor}, or export a checkpoint (moevement windows export)'
        )
    if interleaved and was.expert_tensor != now.expert_tensor:
        raise RefusedWindow(
            '--moe-mlp-glu-interleave-size mixes the rows of experts: start with '
            f'--expert-tensor-parallel-size {was.expert_tensor}'
        )
    if own_data and was.data != now.data:
        raise RefusedWindow(
            '--dataloader-type cyclic shuffles a part of the data for each data-parallel rank: '
            f'start with {was.data} data-parallel ranks, not {now.data}; a run that had '
            '--no-data-sharding from its first start can change their number'
        )


def _splits_further(settings: Settings, of: str, tensor: int) -> bool:
    """True if weights are sharded beyond tensor parallelism, which no size of `Layout` describes.

    Unless a flag raises it, upstream's number of shards is the tensor-parallel size.
    """
    shards = _size(settings, f'{of}tensor_parallel_num_weight_shards')
    return shards > tensor or _size(settings, f'{of}gtp_weight_remat_size') > 1


def _digits(number: int, sizes: list[int]) -> list[int]:
    """Digits of a number in a mixed base, the least significant first."""
    digits = []
    for size in sizes:
        number, digit = divmod(number, max(size, 1))
        digits.append(digit)
    return digits


def _size(settings: Settings, name: str) -> int:
    value: Any = settings.get(name)
    return max(int(value or 1), 1)
