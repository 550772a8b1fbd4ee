# SPDX-License-Identifier: Apache-2.0
"""Pre-trains a (Mixture-of-Experts) GPT with Megatron, with sparse checkpointing on request.

    torchrun ... pretrain_gpt.py <any Megatron flags> [--sparse-ckpt ...]
    torchrun ... -m megatron.moevement.pretrain_gpt <the same flags>    # without a checkout

Without `--sparse-ckpt` this is plain Megatron.
"""

from __future__ import annotations

import gc
import sys

MOEVEMENT_SPARES = True

gc.disable()  # collections take a fifth of the time of these imports, and free hardly anything

if sys.argv[0] == 'moevement pretrain' and {'-h', '--help'}.intersection(sys.argv):
    from megatron.moevement.arguments import add_arguments
    from moevement_ext.system.leaving import Parser

    more = "All others are Megatron's: python -m megatron.moevement.pretrain_gpt --help"
    add_arguments(Parser('moevement pretrain', description=__doc__, epilog=more)).parse_args(['-h'])

from megatron.moevement.seams import cpu_device, starting

_STARTED = __name__ == '__main__' or sys.argv[0] == 'moevement pretrain'
starting.prepare(sys.argv[1:] if _STARTED else None)

import json
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moevement_ext.system import leaving

if __name__ != '__mp_main__':  # a subprocess, e.g. one that writes a checkpoint, is not a worker
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import (
        GPTDataset,
        GPTDatasetConfig,
        MockGPTDataset,
    )
    from megatron.core.enums import ModelType
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )
    from megatron.core.utils import (
        get_attr_wrapped_model,
        get_batch_on_this_cp_rank,
        get_batch_on_this_tp_rank,
    )
    from megatron.training import get_args, get_timers, pretrain, set_startup_timestamps
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.utils import (
        get_blend_and_blend_per_split,
        is_first_or_last_pipeline_stage,
    )

    from megatron.moevement.arguments import add_arguments, allow_expert_slots
    from megatron.moevement.facts import UpstreamArguments
    from megatron.moevement.job import layout_choice
    from megatron.moevement.job.flags import refuse_unsupported
    from megatron.moevement.program import run_with_sparse_checkpointing
    from megatron.moevement.seams import (
        adam,
        datasets,
        dense_tier,
        quiet,
        wandb_run,
        warming,
    )
    from moevement_ext import faults

    datasets.use_compiled()
    if cpu_device.needed():
        cpu_device.patch_upstream()
gc.freeze()  # later collections skip the imported objects
gc.enable()

_PROTECTED = '--sparse-ckpt'
# A loss above this multiple of the largest of the first losses is a spike (--check-for-spiky-loss).
_SPIKE = 10
_BATCH_KEYS = ('tokens', 'labels', 'loss_mask', 'attention_mask', 'position_ids')


def _reads_data(vp_stage: int | None) -> bool:
    """True at both ends of the pipeline, and on the stage of multi-token prediction layers."""
    args = get_args()
    layout = args.pipeline_model_parallel_layout
    if layout is not None:
        layout = PipelineParallelLayerLayout.from_str(layout, args.pipeline_model_parallel_size)
    predicts: bool = mtp_on_this_rank(layout, args.mtp_num_layers, False, vp_stage)
    return predicts or bool(is_first_or_last_pipeline_stage(vp_stage))


def get_batch(data_iterator: Iterator[dict[str, Any]], vp_stage: int | None) -> dict[str, Any]:
    """Read one micro-batch on this rank: tensors [micro batch, sequence / CP], or Nones."""
    if not _reads_data(vp_stage):
        return dict.fromkeys(_BATCH_KEYS)
    args = get_args()
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        loaded = next(data_iterator)
        batch = {
            key: loaded[key].cuda(non_blocking=True) if loaded.get(key) is not None else None
            for key in _BATCH_KEYS
        }
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=bool(args.mtp_num_layers),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(
            ignore_virtual=vp_stage is None, vp_stage=vp_stage
        ),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(
            ignore_virtual=vp_stage is None, vp_stage=vp_stage
        ),
    )
    batch = get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )
    return batch


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Summed token loss, number of tokens, and the values to report of one micro-batch."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    args, machine = get_args(), get_rerun_state_machine()
    validate = partial(machine.validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        for rejects, what in ((torch.isnan, 'NaN'), (torch.isinf, 'Inf')):
            message = f'found {what} in the local forward loss'
            validate(rejection_func=rejects, message=message, fatal=True)
    if args.check_for_spiky_loss:
        spiky = partial(machine.is_unexpectedly_large, threshold=_SPIKE, context='loss')
        validate(rejection_func=spiky, message='the local forward loss jumped', fatal=False)
    num_tokens = mask.sum().detach().to(torch.int)
    report = torch.cat([loss.detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {'lm loss': report}


def forward_step(
    data_iterator: Iterator[dict[str, Any]], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, partial[Any]]:
    """Run one micro-batch forward through this stage's model chunk, or return its schedule plan.

    Upstream asks for the plan if it interleaves layers of two micro-batches.
    """
    timers = get_timers()
    timers('batch-generator', log_level=2).start()
    faults.stall()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, 'vp_stage'))
    timers('batch-generator').stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch['tokens'],
        batch['position_ids'],
        batch['attention_mask'],
        labels=batch['labels'],
        loss_mask=batch['loss_mask'],
    )
    return output, partial(loss_func, batch['loss_mask'])


def _dataset_config(args: UpstreamArguments) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    lengths = args.per_dataset_sequences_path
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequences_per_dataset=json.loads(Path(lengths).read_text('utf-8')) if lengths else None,
    )


def _built_on_this_rank(vp_stage: int | None) -> bool:
    return _reads_data(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Train, validation and test datasets of `num_samples` samples each."""
    args = get_args()
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        num_samples,
        partial(_built_on_this_rank, vp_stage=vp_stage),
        _dataset_config(args),
    ).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def warm_up(flags: Sequence[str]) -> None:
    """Prepare a process that waits to become a worker of a job with these flags."""
    if _PROTECTED in flags:
        warming.warm_up()


def _take_layout(flags: Sequence[str]) -> list[str]:
    """Return the flags of a layout that fits all ranks."""
    node = layout_choice.NodeCapacity.here()

    def too_little(flags: Sequence[str], ranks: int) -> str | None:
        return layout_choice.too_little(flags, ranks, node, add_arguments)

    started = int(os.environ.get('WORLD_SIZE', '1'))
    return layout_choice.fitted(flags, started, too_little, node.ranks)


def main() -> None:
    """Parse the command line and train."""
    set_startup_timestamps(program_start=starting.PROGRAM_START, main_entry=time.time())
    quiet.arguments_once()
    if _PROTECTED in sys.argv:
        warming.install()
        allow_expert_slots()
        dense_tier.keep_given_flags()  # the parser may load the flags of a checkpoint
        with leaving.in_one_line():
            wandb_run.keep()
            sys.argv += _take_layout(sys.argv[1:])
    args = parse_and_validate_args(extra_args_provider=add_arguments)
    with leaving.in_one_line():
        adam.choose_fp8_masters(args)
        if args.sparse_ckpt:
            refuse_unsupported(vars(args))  # before upstream refuses with a long text
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    train = partial(pretrain, config, datasets_provider, ModelType.encoder_or_decoder, forward_step)
    with leaving.in_one_line():
        run_with_sparse_checkpointing(train, args)


if __name__ == '__main__':
    main()
