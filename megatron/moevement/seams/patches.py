# SPDX-License-Identifier: Apache-2.0
"""The only place that replaces parts of upstream.

Modules that wrap, override or call a part that upstream does not promise list its parameters in the
table; those that read or set such an attribute list its name in `ATTRIBUTES`. `check` compares them
at start: if upstream has changed, the program ends with the names instead of training wrongly.
Upstream calls functions through its modules and methods through their classes, so a wrapper set
there takes effect everywhere.

The whole package was checked against megatron-core 0.19.2 and torch 2.11 to 2.15; modules that
depend on Transformer Engine name its versions.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from moevement_ext.errors import UserError

CHECKED_VERSION = 'megatron-core 0.19.2'

_OF_A_SCHEDULE = (
    'forward_step_func', 'data_iterator', 'model', 'num_microbatches', 'seq_length',
    'micro_batch_size', 'decoder_seq_length', 'forward_only', 'collect_non_loss_data',
    'first_val_step', 'adjust_tensor_shapes_fn', 'p2p_communicator', 'pg_collection',
    'force_all_reduce',
)  # fmt: skip

UPSTREAM = {
    # The trainer.
    'megatron.training.training:initialize_megatron': (
        'allow_no_cuda', 'skip_mpu_initialization', 'get_embedding_ranks',
        'get_position_embedding_ranks', 'store', 'skip_model_parallel_init', 'seed_pp_group',
        'seed_dp_group', 'seed_tp_group', 'seed_ep_group', 'seed_etp_group', 'skip_random_seed',
    ),
    'megatron.training.arguments:_print_args': ('title', 'args'),
    'megatron.training.argument_utils:ArgumentGroupFactory._get_field_docstrings': (
        'self', 'src_cfg_class',
    ),
    'megatron.training.ft_integration:setup': (),
    'megatron.training.training:setup_model_and_optimizer': (
        'model_type', 'model_provider_func', 'checkpointing_context', 'cfg_container',
        'pg_collection',
    ),
    'megatron.training.training:load_checkpoint': (
        'ddp_model', 'optimizer', 'opt_param_scheduler', 'load_arg', 'strict',
        'checkpointing_context', 'skip_load_to_model_and_opt', 'tp_group', 'pp_group',
        'dp_cp_group', 'dp_group', 'expt_dp_group', 'rng_state_key_prefix',
    ),
    'megatron.training.training:save_checkpoint': (
        'iteration', 'model', 'optimizer', 'opt_param_scheduler',
        'num_floating_point_operations_so_far', 'checkpointing_context', 'pipeline_rank',
        'expert_rank', 'tensor_rank', 'pipeline_parallel', 'expert_parallel',
        'non_persistent_ckpt', 'train_data_iterator', 'preprocess_common_state_dict_fn', 'release',
        'tp_group', 'pp_group', 'dp_cp_group', 'dp_group', 'expt_dp_group', 'rng_state_key_prefix',
    ),
    'megatron.training.checkpointing:generate_state_dict': (
        'args', 'model', 'optimizer', 'opt_param_scheduler', 'rng_state', 'iteration',
        'optim_sd_kwargs', 'model_sd_kwargs', 'rerun_state',
    ),
    'megatron.training.checkpointing:load_args_from_checkpoint': (
        'args', 'load_arg', 'checkpointing_context',
    ),
    'megatron.training.checkpointing:schedule_async_save': ('async_request',),
    'megatron.training.checkpointing:_get_non_persistent_iteration': (
        'non_persistent_global_dir', 'args', 'checkpointing_context',
    ),
    'megatron.training.training:build_train_valid_test_data_iterators': (
        'build_train_valid_test_datasets_provider',
    ),
    'megatron.training.training:build_pretraining_data_loader': ('dataset', 'consumed_samples'),
    'megatron.training.training:train': (
        'forward_step_func', 'model', 'optimizer', 'opt_param_scheduler', 'train_data_iterator',
        'valid_data_iterator', 'process_non_loss_data_func', 'config', 'checkpointing_context',
        'non_loss_data_func', 'inference_model', 'p2p_communicator', 'pg_collection',
    ),
    'megatron.training.training:train_step': (
        'forward_step_func', 'data_iterator', 'model', 'optimizer', 'opt_param_scheduler',
        'config', 'forward_backward_func', 'iteration', 'pg_collection', 'p2p_communicator',
    ),
    'megatron.training.training:training_log': (
        'loss_dict', 'total_loss_dict', 'learning_rate', 'iteration', 'loss_scale',
        'report_memory_flag', 'skipped_iter', 'grad_norm', 'params_norm', 'num_zeros_in_grad',
        'max_attention_logit', 'pg_collection', 'is_first_iteration',
        'seqlen_squared_sum_in_batch', 'total_real_tokens_in_batch',
    ),
    'megatron.training.training:print_rank_last': ('message',),
    'megatron.training.training:evaluate': (
        'forward_step_func', 'data_iterator', 'model', 'process_non_loss_data_func', 'config',
        'verbose', 'non_loss_data_func', 'eval_iters', 'pg_collection', 'p2p_communicator',
    ),
    'megatron.training.training:evaluate_and_print_results': (
        'prefix', 'forward_step_func', 'data_iterator', 'model', 'iteration',
        'process_non_loss_data_func', 'config', 'verbose', 'write_to_tensorboard',
        'non_loss_data_func', 'pg_collection', 'p2p_communicator',
    ),
    'megatron.training.training:save_checkpoint_and_time': (
        'iteration', 'model', 'optimizer', 'opt_param_scheduler',
        'num_floating_point_operations_so_far', 'checkpointing_context', 'non_persistent_ckpt',
        'train_data_iterator',
    ),
    'megatron.training.training:checkpoint_and_decide_exit': (
        'model', 'optimizer', 'opt_param_scheduler', 'iteration',
        'num_floating_point_operations_so_far', 'checkpointing_context', 'train_data_iterator',
    ),
    'megatron.training.training:num_floating_point_operations': (
        'args', 'batch_size', 'seqlen_squared_sum_in_batch', 'total_real_tokens_in_batch',
    ),
    # Optimizers.
    'megatron.core.optimizer:_get_param_groups': ('model_chunks', 'config', 'config_overrides'),
    'megatron.core.optimizer.optimizer:get_grad_norm_fp32': (
        'grads_for_norm', 'norm_type', 'grad_stats_parallel_group',
    ),
    'megatron.core.optimizer.optimizer:clip_grad_by_total_norm_fp32': (
        'parameters', 'max_norm', 'total_norm', 'use_decoupled_grad',
    ),
    'megatron.core.optimizer.optimizer:'
    'MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan': ('self',),
    'megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_state_dict': (
        'self', 'model_sharded_state_dict', 'is_loading', 'sharding_type', 'metadata',
    ),
    'megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict': (
        'self', 'state_dict',
    ),
    'megatron.core.optimizer.distrib_optimizer:'
    'DistributedOptimizer._set_main_param_and_optimizer_states': (
        'self', 'model_param', 'tensors',
    ),
    **{
        f'megatron.core.optimizer.optimizer:{optimizer}.{method}': ('self',)
        for optimizer in ('MixedPrecisionOptimizer', 'FP32Optimizer', 'ChainedOptimizer')
        for method in ('prepare_grads', 'step_with_ready_grads', 'step')
    },
    # Layers, passes, pipeline, random numbers, data.
    'megatron.core.distributed.finalize_model_grads:finalize_model_grads': (
        'model', 'num_tokens', 'pg_collection', 'force_all_reduce',
    ),
    'megatron.core.transformer.mlp:LinearFc1Interface.backward_dw': ('self',),
    'megatron.core.full_cuda_graph:FullCudaGraphWrapper.__call__': ('self', 'args', 'kwargs'),
    'megatron.core.transformer.moe.router:apply_router_token_dropping': (
        'routing_probs', 'routing_map', 'router_topk', 'capacity_factor', 'drop_policy',
        'pad_to_capacity',
    ),
    'megatron.core.transformer.moe.router:router_gating_linear': (
        'inp', 'weight', 'bias', 'router_dtype',
    ),
    'megatron.core.transformer.moe.moe_utils:RouterGatingLinearFunction.backward': (
        'ctx', 'grad_output',
    ),
    'megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu': (
        'tensor', 'as_numpy', 'record_stream',
    ),
    'megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__': (
        'cls', 'config', 'hidden_size', 'eps', 'persist_layer_norm', 'zero_centered_gamma',
        'normalization',
    ),
    'megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate': (
        'self', 'tensor_send_next', 'tensor_send_prev', 'recv_prev', 'recv_next', 'tensor_shape',
        'wait_on_reqs',
    ),
    'megatron.core.pipeline_parallel.schedules:_build_default_pg_collection': (),
    'megatron.core.pipeline_parallel.schedules:forward_step': (
        'forward_step_func', 'data_iterator', 'model', 'num_microbatches', 'input_tensor',
        'forward_data_store', 'config', 'cp_group_size', 'collect_non_loss_data',
        'checkpoint_activations_microbatch', 'is_first_microbatch', 'current_microbatch',
        'vp_stage', 'is_last_stage',
    ),
    'megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining': _OF_A_SCHEDULE,
    'megatron.core.pipeline_parallel.schedules:'
    'forward_backward_pipelining_without_interleaving': _OF_A_SCHEDULE,
    'megatron.core.pipeline_parallel.schedules:'
    'forward_backward_pipelining_with_interleaving': _OF_A_SCHEDULE,
    'megatron.core.tensor_parallel.random:_get_cuda_rng_state': ('device', 'clone', 'graph_safe'),
    'megatron.core.tensor_parallel.random:_set_cuda_rng_state': (
        'new_state', 'device', 'graph_safe',
    ),
    'megatron.core.datasets.utils:compile_helpers': (),
    'megatron.core.datasets.gpt_dataset:GPTDataset._build_document_sample_shuffle_indices': (
        'self',
    ),
    'megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__': ('self', 'idx'),
    'megatron.core.datasets.blended_dataset:BlendedDataset._build_indices': ('self',),
}  # fmt: skip
"""Parameters by part, written as `module:function` or `module:Class.method`."""

ATTRIBUTES = {
    'megatron.training.arguments:parse_args': ('_is_global_batch_size_explicitly_specified',),
    'megatron.training.checkpointing': ('_NON_PERSISTENT_CKPT_SUBDIR',),
    'megatron.training.global_vars': ('_GLOBAL_TIMERS',),
    'megatron.core.dist_checkpointing.strategies.filesystem_async': ('_results_queue',),
    'megatron.core.num_microbatches_calculator:StepBatchsizeNumMicroBatchesCalculator': (
        '_parse_schedule',
    ),
    'megatron.core.parallel_state': ('_DATA_PARALLEL_GROUP_GLOO',),
    'megatron.core.rerun_state_machine:RerunStateMachine.__init__': (
        'state', 'mode', 'saved_state', 'current_iteration', 'NOT_RUNNING_YET',
    ),
    'megatron.core.timers:Timers.__init__': ('_timers',),
    'megatron.core.timers:TimerBase.__init__': ('name',),
    'megatron.core.timers:Timer.__init__': ('_started', '_start_time', '_elapsed'),
    'megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.__init__': (
        'grad_reduce_handle', 'param_gather_handle', 'param_gather_dispatched', 'is_first_batch',
        'per_param_grad_ready_counts', 'golden_per_param_grad_ready_counts', 'is_last_microbatch',
        'grad_reduce_finished',
    ),
    'megatron.core.optimizer.distrib_optimizer:DistributedOptimizer': (
        '_get_model_param_range_map',
    ),
    'megatron.core.optimizer.layer_wise_optimizer:'
    'LayerWiseDistributedOptimizer.has_grad_norm_group': ('_has_grad_norm_group_cache',),
    'megatron.core.optimizer.optimizer:ChainedOptimizer.has_grad_norm_group': (
        '_has_grad_norm_group_cache',
    ),
    'megatron.core.optimizer.optimizer:MegatronOptimizer.has_grad_norm_group': (
        '_has_grad_norm_group_cache',
    ),
    'megatron.core.transformer.moe.experts:TEGroupedMLP.__init__': ('_fused_ops',),
    'megatron.core.transformer.moe.moe_logging:MoEMetricsTracker': ('metrics',),
    'megatron.core.transformer.moe.router:TopKRouter': ('_maintain_float32_expert_bias',),
    'megatron.core.transformer.moe.shared_experts:SharedExpertMLP.__init__': (
        '_overlap_state', 'cached_fc1_input', 'cached_fc2_input', 'cached_fc2_output',
        'cached_output', 'IDLE',
    ),
    'megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper': (
        'tracker', 'clean_metrics_in_tracker',
    ),
    'torch.autograd': ('_disable_profiler',),
    'torch._C._autograd': ('_profiler_enabled',),
}  # fmt: skip
"""Attributes by their module or class, or by the function of upstream that uses or sets them.

The latter are attributes of objects: setting one that upstream no longer reads has no effect.
"""

TORCH = {
    'torch.distributed:barrier': ('group',),
    'torch.distributed:new_group': ('ranks', 'timeout', 'backend'),
    'torch.distributed:all_gather_object': ('object_list', 'obj', 'group'),
    'torch.utils.data:DataLoader.__iter__': ('self',),
}
"""First parameters of public functions of torch; later versions of torch append some."""

OBJECTS = {
    'step', 'step_with_ready_grads', 'prepare_grads', 'finalize_model_grads_func', 'backward_dw',
}  # fmt: skip
"""Functions that `wrap_object` replaces in optimizers, in the model's configuration and in layers.

The parts of the same names (without `_func`) in `UPSTREAM` have their parameters.
"""

TAKING = {
    'megatron.core.optimizer:Adam': (
        'master_weights', 'master_weight_dtype', 'exp_avg_dtype', 'exp_avg_sq_dtype',
    ),
}  # fmt: skip
"""Parts that some installations lack, with some of their parameters; checked when wrapped."""

Wrapper = Callable[..., object]
"""Called as `wrapper(original, ...)` with the arguments of the original."""


def check() -> None:
    """Compare all parts with the tables. Call before the adapter uses any of them.

    Raises:
        UserError: a part differs; the message names the first one.
    """
    for part in (*UPSTREAM, *TORCH):
        _find(part)
    for holder in ATTRIBUTES:
        _check_attributes(holder)


def wrap(part: str, wrapper: Wrapper, by_name: bool = False) -> None:
    """Replace a part by `wrapper(original, ...)`, for the lifetime of the process.

    `by_name`: it gets all arguments as keywords, also those that upstream passes by position.

    Raises:
        UserError: the part differs from the table.
    """
    owner, name, original = _find(part)
    signature = inspect.signature(original)

    def named(original: Callable[..., object], *args: object, **kwargs: object) -> object:
        return wrapper(original, **signature.bind(*args, **kwargs).arguments)

    setattr(owner, name, _wrapping(original, named if by_name else wrapper))


def shared(call: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Arguments of a call that a part takes, too, by the same names."""
    return {name: call[name] for name in UPSTREAM[part] if name in call}


def wrap_object(owner: object, name: str, wrapper: Wrapper) -> Callable[[], None]:
    """Replace a function of one object, listed in `OBJECTS`; returns a function that undoes it."""
    assert name in OBJECTS, name
    own, original = name in vars(owner), getattr(owner, name)
    setattr(owner, name, _wrapping(original, wrapper))
    if own:
        return functools.partial(setattr, owner, name, original)
    return functools.partial(delattr, owner, name)


@contextmanager
def wrapped(part: str, wrapper: Wrapper) -> Iterator[None]:
    """Replace a part as `wrap` does, within the context only."""
    owner, name, original = _find(part)
    setattr(owner, name, _wrapping(original, wrapper))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _wrapping(original: Callable[..., object], wrapper: Wrapper) -> Callable[..., object]:
    @functools.wraps(original)
    def call(*args: object, **kwargs: object) -> object:
        return wrapper(original, *args, **kwargs)

    return call


def _find(part: str) -> tuple[Any, str, Callable[..., object]]:
    """Module or class that holds a part, the name of the part there, and its present value."""
    module, _, path = part.partition(':')
    *outer, name = path.split('.')
    owner = _value(part, module, *outer)
    original = _value(part, module, *outer, name)
    found = tuple(inspect.signature(original).parameters)
    expected = TORCH.get(part) or TAKING.get(part) or UPSTREAM[part]
    if part in TORCH:
        compared = found[: len(expected)]
    elif part in TAKING:
        compared = tuple(one for one in expected if one in found)
    else:
        compared = found
    if compared != expected:
        raise _changed(part, f'has the parameters {found}, expected {expected}')
    return owner, name, original


def _check_attributes(holder: str) -> None:
    module, _, path = holder.partition(':')
    found = inspect.unwrap(_value(holder, module, *filter(None, path.split('.'))))
    names = found.__code__.co_names if inspect.isfunction(found) else dir(found)
    for name in ATTRIBUTES[holder]:
        if name not in names:
            raise _changed(holder, f'has no {name}')


def _value(part: str, module: str, *path: str) -> Any:
    try:
        return functools.reduce(getattr, path, importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise _changed(part, f'is not there ({error})') from error


def _changed(part: str, how: str) -> UserError:
    return UserError(
        f'{part} {how}: this is not the version that sparse checkpointing was checked against. '
        f'Install {CHECKED_VERSION}.'
    )
