# SPDX-License-Identifier: Apache-2.0
"""The identity of a run: windows of another run or another layout are refused by name.

There are three digests. The digests of the run and of the parallel layout together decide whether
windows can be loaded unchanged. The training digest omits the settings of the run that may change
with the layout (`MAY_CHANGE`); it identifies windows that the same training captured in another
layout.

The digests cover flags only. `run_settings` holds the flags by name, the content of files (see
`named_files`), versions and environment variables (see `computing`).

Every setting counts except those named here, which cannot change a bit of training; a new flag of
upstream counts until it is known to have no effect on bits. The parallel layout has a separate
digest, so that a refusal can state whether run or layout differ.

`--train-iters` counts (`--train-samples` likewise): the learning rate decays over it by default,
weight decay grows over it, and upstream shuffles datasets over as many epochs as all samples of the
run need. With a larger number, a replay could read other samples than the original iterations did.
A finished job leaves no windows, so the rule affects only a job that is extended after a failure:
that job resumes from its dense checkpoint. Evaluation flags count, as evaluation may draw random
numbers, and so does `--ckpt-step`, which selects a checkpoint.
"""

import enum
import functools
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import PurePath
from typing import cast

import torch
import xxhash

from megatron.moevement.facts import Settings
from megatron.moevement.job import computing, named_files, placing
from moevement_ext.config import MOEVEMENT, OFF, SparseCheckpointConfig, slurm_run_id
from moevement_ext.memory.shelf import directory_of
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.settings import Placed, RunSettings, Table, bounded

_DENSE_CHECKPOINTS = (
    'save load save_interval save_retain_interval non_persistent_save_interval '
    'non_persistent_ckpt_type non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir '
    'non_persistent_local_ckpt_algo exit_on_missing_checkpoint ckpt_format auto_detect_ckpt_format '
    'ckpt_fully_parallel_save ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo '
    'ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group '
    'ckpt_fully_parallel_save_deprecated ckpt_assume_constant_structure '
    'ckpt_load_validate_sharding_integrity dist_ckpt_strictness dist_ckpt_workers use_dist_ckpt '
    'use_dist_ckpt_deprecated dist_ckpt_format_deprecated dist_ckpt_optim_fully_reshardable '
    'distrib_optim_fully_reshardable_mem_efficient async_save async_strategy '
    'use_persistent_ckpt_worker async_ckpt_cpu_priority async_ckpt_io_priority '
    'async_ckpt_use_cpu_shm replication replication_jump replication_factor verify_integrity '
    'no_save_optim no_save_rng'
).split()
_LOGGING = (
    'log_interval log_params_norm log_throughput log_progress log_num_zeros_in_grad '
    'log_timers_to_tensorboard log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard '
    'log_memory_to_tensorboard log_memory_interval log_device_memory_used '
    'log_world_size_to_tensorboard log_energy log_straggler timing_log_level timing_log_option '
    'barrier_with_L1_time tensorboard_dir tensorboard_log_interval tensorboard_queue_size '
    'logging_level wandb_project wandb_exp_name wandb_save_dir wandb_entity enable_one_logger '
    'one_logger_project one_logger_run_name one_logger_async app_tag_run_name app_tag_run_version '
    'moe_per_layer_logging config_logger_dir dump_param_to_param_group_map straggler_ctrlr_port '
    'straggler_minmax_count disable_straggler_on_startup result_rejected_tracker_filename timers '
    'moe_routing_trace_path moe_routing_trace_max_training_iters '
    'moe_routing_trace_capture_logits moe_routing_trace_capture_hidden_states '
    'moe_routing_trace_dump_weights'
).split()
_PROFILING = (
    'profile profile_step_start profile_step_end profile_ranks use_pytorch_profiler '
    'pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack '
    'pytorch_profiler_collect_chakra record_memory_history memory_snapshot_path record_shapes '
    'nvtx_ranges run_workload_inspector_server flight_recorder_dump_path '
    'flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout '
    'flight_recorder_include_stack_trace flight_recorder_include_only_active '
    'flight_recorder_extra_dump_on_exec'
).split()
_HOST = (
    'data_cache_path object_storage_cache_path mmap_bin_files num_workers '
    'num_dataset_builder_threads dataloader_fast_cache_load dataloader_defer_npy_index_mmap '
    'manual_gc manual_gc_interval manual_gc_eval empty_unused_memory_level enable_msc '
    'disable_msc_deprecated'
).split()
_LAUNCH = (
    'rank local_rank timeout distributed_timeout_minutes exit_interval exit_duration_in_mins '
    'exit_signal exit_signal_handler exit_signal_handler_for_dataloader '
    'exit_signal_handler_for_training distributed_timeout_seconds_after_init '
    'use_gloo_process_groups train_sync_interval check_weight_hash_across_dp_replicas_interval '
    'adlr_autoresume adlr_autoresume_interval enable_ft_package calc_ft_timeouts '
    'ft_num_warmup_iters fault_injector_ranks fault_injector_num_ranks fault_injector_fault_types '
    'fault_injector_fault_probabilities fault_injector_fault_delay fault_injector_mtti_seconds '
    'fault_injector_offset_seconds fault_injector_delay_start_iteration fault_injector_seed'
).split()
# Progress of training, not its definition; and settings that set-up derives from the data.
_PROGRESS = (
    'iteration curr_iteration consumed_train_samples consumed_valid_samples skipped_train_samples '
    'num_floating_point_operations_so_far do_train do_valid do_test '
    '_is_global_batch_size_explicitly_specified'  # the size itself counts
).split()
INDIFFERENT = frozenset((*_DENSE_CHECKPOINTS, *_LOGGING, *_PROFILING, *_HOST, *_LAUNCH, *_PROGRESS))

# With one of these flags, training does not continue the dense checkpoint's run: it begins a new
# one.
_OTHER_START = ('finetune', 'no_load_optim', 'no_load_rng')

_STRATEGY = 'sparse_ckpt_strategy'
ARGUMENTS = 'sparse_ckpt_arguments'
"""Name of a setting with the arguments of a program that is not upstream's, by flag. They do not
count, as some may change no bit; a difference is reported."""

_PLAIN = (type(None), bool, float, str, bytes, torch.dtype, torch.device, PurePath, timedelta)

LAYOUT = frozenset(
    (
        'world_size data_parallel_size tensor_model_parallel_size pipeline_model_parallel_size '
        'transformer_pipeline_model_parallel_size virtual_pipeline_model_parallel_size '
        'num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank '
        'pipeline_model_parallel_layout decoder_first_pipeline_num_layers '
        'decoder_last_pipeline_num_layers num_layers_in_first_pipeline_stage '
        'num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split '
        'account_for_loss_in_pipeline_split expert_model_parallel_size expert_tensor_parallel_size '
        'context_parallel_size hierarchical_context_parallel_sizes sequence_parallel '
        'num_distributed_optimizer_instances use_tp_pp_dp_mapping '
        'tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards '
        'gtp_weight_remat_size expert_gtp_weight_remat_size'
    ).split()
)


MAY_CHANGE = frozenset(
    (
        'use_distributed_optimizer overlap_grad_reduce overlap_param_gather '
        'overlap_param_gather_with_optimizer_step align_grad_reduce align_param_gather '
        'ddp_bucket_size ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw '
        'ddp_average_in_collective overlap_p2p_comm overlap_p2p_comm_warmup_flush batch_p2p_comm '
        'microbatch_group_size_per_vp_stage defer_embedding_wgrad_compute wgrad_deferral_limit '
        'recompute_granularity recompute_method recompute_num_layers recompute_modules '
        'distribute_saved_activations inprocess_active_world_size'
    ).split()
)
"""Settings of the run that decide how a layout works, not what is trained: sharding of the
optimizer, overlap, buckets, recomputation. Upstream derives some of them from the layout."""


def run_identity(settings: Settings, run_id: str) -> str:
    """Digest of the run id and of all settings that may affect bits."""
    return _digest({'run id': run_id, **_counting(settings)})


def _counting(settings: Settings) -> dict[str, object]:
    """Settings that count, by name.

    The strategy counts, although it changes no bit: its windows have other content.

    The dense checkpoint of `--load` is left out, as a resumed job may load its own checkpoint. It
    counts with the flags that begin a new run from a checkpoint (`_OTHER_START`).

    The number of query groups is left out where it is unused: with `--use-checkpoint-args` it is 1
    before the first checkpoint, and the number of heads afterwards.
    """
    found = {name: value for name, value in settings.items() if counts(name)}
    found[_STRATEGY] = settings.get(_STRATEGY, MOEVEMENT)
    if any(settings.get(name) for name in _OTHER_START):
        found['load'] = settings.get('load')
    if not found.get('group_query_attention'):
        found.pop('num_query_groups', None)
    return found


def counts(name: str) -> bool:
    """True unless a setting cannot change what training computes, or belongs to the layout."""
    return name not in INDIFFERENT | LAYOUT and not name.startswith('sparse_ckpt')


def training_identity(settings: Settings, run_id: str) -> str:
    """Digest of the settings that are equal in all layouts: data, schedules, seeds, model."""
    counting = _counting(settings)
    kept = {name: value for name, value in counting.items() if name not in MAY_CHANGE}
    return _digest({'run id': run_id, **kept})


def topology_identity(settings: Settings) -> str:
    """Digest of the parallel layout."""
    return _digest({name: settings.get(name) for name in LAYOUT})


def rank_identity(settings: Settings, rank: int, config: SparseCheckpointConfig) -> RankIdentity:
    """The stamp of every slot of this rank."""
    run_id = called(settings, config)
    settings = {**settings, _STRATEGY: config.strategy}
    run, topology = run_identity(settings, run_id), topology_identity(settings)
    told = run_settings(settings, run_id)
    layout = placing.layout_of(settings)
    if layout is None:
        return RankIdentity(run, topology, rank, told)
    seat = placing.seat_of(rank, layout, bool(settings.get('use_tp_pp_dp_mapping')))
    placed = Placed(training_identity(settings, run_id), layout, seat)
    return RankIdentity(run, topology, rank, told, placed)


def run_settings(settings: Settings, run_id: str) -> RunSettings:
    """Settings of this launch by name, to report how two launches differ."""
    counting = _counting(settings)
    changing = {name: settings.get(name) for name in LAYOUT | (MAY_CHANGE & counting.keys())}
    layout = {_flag(name): _shown(value) for name, value in changing.items()}
    flags = {
        _flag(name): _shown(value) for name, value in counting.items() if name not in MAY_CHANGE
    }
    on_cpu = settings.get('distributed_backend') == 'gloo'
    return bounded(
        RunSettings(
            flags={'--sparse-ckpt-run-id': run_id, **flags},
            layout=layout,
            files=named_files.held_by_files(settings),
            versions={**computing.versions(on_cpu), **named_files.code(settings)},
            environment={
                **computing.environment(),
                **named_files.other_files(settings, counts),
                **cast(Table, settings.get(ARGUMENTS, {})),
            },
        )
    )


def run_name(settings: Settings, config: SparseCheckpointConfig) -> str:
    """Directory name of the run; with `--sparse-ckpt-elastic`, one per layout."""
    name = called(settings, config)
    if config.elastic == OFF:
        return name
    settings = {**settings, _STRATEGY: config.strategy}
    counting = run_identity(settings, name), topology_identity(settings)
    return directory_of(name, xxhash.xxh3_64_hexdigest('/'.join(counting).encode()))


def called(settings: Settings, config: SparseCheckpointConfig) -> str:
    """Name of the run: from the flag, else from Slurm's job id, else a digest of settings."""
    if config.run_id is not None:
        return config.run_id
    of_slurm = slurm_run_id()
    if of_slurm is not None:
        return of_slurm
    digest = run_identity if config.elastic == OFF else training_identity
    return f'run-{digest({**settings, _STRATEGY: config.strategy}, "")}'


def _flag(name: str) -> str:
    return f'--{name.replace("_", "-")}'


def _shown(value: object) -> str:
    """A value in command line syntax, if it is simple."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ' '.join(value)
    return _text(value)


def _digest(settings: Settings) -> str:
    # Paths may contain bytes that are not UTF-8.
    return xxhash.xxh3_64_hexdigest(_text(settings).encode(errors='surrogateescape'))


def _text(value: object) -> str:
    """A value as text that is equal in every process: without addresses, in a fixed order."""
    if isinstance(value, _PLAIN) or type(value) is int:
        return repr(value)
    if isinstance(value, Mapping):
        return _joined(sorted(f'{_text(key)}:{_text(item)}' for key, item in value.items()))
    if isinstance(value, (set, frozenset)):
        return _joined(sorted(map(_text, value)))
    if isinstance(value, (list, tuple)):
        return _joined(map(_text, value))
    if isinstance(value, functools.partial):
        return _text([value.func, value.args, value.keywords])
    if hasattr(value, '__qualname__'):  # a function, method or class, with its closure
        closed_over = [cell.cell_contents for cell in getattr(value, '__closure__', None) or ()]
        return f'{value.__module__}.{value.__qualname__}{_text(closed_over)}'
    kind = f'{type(value).__module__}.{type(value).__qualname__}'
    if isinstance(value, enum.Enum):
        return f'{kind}.{value.name}'
    return kind + _text(getattr(value, '__dict__', {}))


def _joined(texts: Iterable[str]) -> str:
    return f'[{",".join(texts)}]'
