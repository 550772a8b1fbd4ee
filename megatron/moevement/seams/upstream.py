# SPDX-License-Identifier: Apache-2.0
"""The functions of upstream's trainer that sparse checkpointing stands around.

`megatron.training.training` calls these through its module globals, so a wrapper put there is what
`pretrain` runs. Their parameters are checked at start: if upstream has changed, the program stops
with the names instead of training wrongly.

Checked against megatron-core 0.19.2.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import megatron.training.training as training
import torch
from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS
from megatron.core.pipeline_parallel import schedules

from megatron.moevement.seams.preflight import InstallationError
from moevement_ext.regroup.process_groups import stand_in_for

_EXPECTED = {
    'setup_model_and_optimizer': (
        'model_type', 'model_provider_func', 'checkpointing_context', 'cfg_container',
        'pg_collection',
    ),
    'train': (
        'forward_step_func', 'model', 'optimizer', 'opt_param_scheduler', 'train_data_iterator',
        'valid_data_iterator', 'process_non_loss_data_func', 'config', 'checkpointing_context',
        'non_loss_data_func', 'inference_model', 'p2p_communicator', 'pg_collection',
    ),
    'train_step': (
        'forward_step_func', 'data_iterator', 'model', 'optimizer', 'opt_param_scheduler',
        'config', 'forward_backward_func', 'iteration', 'pg_collection', 'p2p_communicator',
    ),
    'training_log': (
        'loss_dict', 'total_loss_dict', 'learning_rate', 'iteration', 'loss_scale',
        'report_memory_flag', 'skipped_iter', 'grad_norm', 'params_norm', 'num_zeros_in_grad',
        'max_attention_logit', 'pg_collection', 'is_first_iteration',
        'seqlen_squared_sum_in_batch', 'total_real_tokens_in_batch',
    ),
    'evaluate_and_print_results': (
        'prefix', 'forward_step_func', 'data_iterator', 'model', 'iteration',
        'process_non_loss_data_func', 'config', 'verbose', 'write_to_tensorboard',
        'non_loss_data_func', 'pg_collection', 'p2p_communicator',
    ),
    'save_checkpoint_and_time': (
        'iteration', 'model', 'optimizer', 'opt_param_scheduler',
        'num_floating_point_operations_so_far', 'checkpointing_context', 'non_persistent_ckpt',
        'train_data_iterator',
    ),
    'build_pretraining_data_loader': ('dataset', 'consumed_samples'),
    'num_floating_point_operations': (
        'args', 'batch_size', 'seqlen_squared_sum_in_batch', 'total_real_tokens_in_batch',
    ),
}  # fmt: skip


def check() -> None:
    """Compare upstream's signatures with those this adapter was written for.

    Raises:
        InstallationError: naming each function that differs.
    """
    for name, expected in _EXPECTED.items():
        found = tuple(inspect.signature(getattr(training, name)).parameters)
        if found != expected:
            raise InstallationError(
                f'megatron.training.training.{name} has the parameters {found}, expected '
                f'{expected}: this megatron-core is not the one sparse checkpointing was checked '
                'against. Install megatron-core 0.19.2.'
            )


def wrap(name: str, wrapper: Callable[..., Any]) -> None:
    """Have upstream call `wrapper(original, ...)` instead of its own function `name`."""
    original = getattr(training, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(training, name, wrapped)


def groups() -> Any:
    """The process groups that upstream's schedules use when they are given none."""
    return schedules._build_default_pg_collection()


@contextmanager
def without_connections(args: Any) -> Iterator[None]:
    """Within the context, set-up makes process groups that talk to nobody.

    For a process that joins a running job: the others do not take part in its set-up. The groups
    are connected later, in place.
    """
    new_group = torch.distributed.new_group

    def new_fake_group(*given: Any, **kwargs: Any) -> Any:
        kwargs['backend'] = 'fake'
        return new_group(*given, **kwargs)

    stand_in_for(args.distributed_backend)
    args.fake_process_group = True
    torch.distributed.new_group = new_fake_group
    try:
        yield
    finally:
        args.fake_process_group = False
        torch.distributed.new_group = new_group


def fill_first_step_caches(optimizer: Any) -> None:
    """Ask now what optimizers find out together in their first step, and then remember.

    Without connections, so that every rank finds what it has itself: no gradient norm of its own,
    as those are for multi-token prediction, which is not recovered locally. Some ranks may have
    asked the others long ago, new ones never, and none before the first update: whoever still had
    to ask in an iteration would wait for the rest for ever.
    """
    for group in SEPARATE_GRAD_NORM_GROUPS:
        optimizer.has_grad_norm_group(group)


def floating_point_operations(args: Any) -> float:
    """What upstream counts for training on one sample of full length."""
    return float(training.num_floating_point_operations(args, 1))


def dense_checkpoint_iteration(args: Any) -> int:
    """Iteration that `--load` would go on from, -1 if there is no dense checkpoint."""
    from megatron.training.checkpointing import (
        checkpoint_exists,
        get_checkpoint_tracker_filename,
        read_metadata,
    )

    if args.load is None or not checkpoint_exists(args.load):
        return -1
    if args.finetune:
        return 0
    if args.ckpt_step is not None:
        return int(args.ckpt_step)
    iteration, _ = read_metadata(get_checkpoint_tracker_filename(args.load))
    return int(iteration)


def saved_iteration(args: Any) -> int:
    """Iteration of the newest dense checkpoint in `--save`, -1 if there is none."""
    from megatron.training.checkpointing import get_checkpoint_tracker_filename, maybe_msc

    if args.save is None:
        return -1
    tracker = get_checkpoint_tracker_filename(args.save)
    if not maybe_msc.os.path.isfile(tracker):
        return -1
    with maybe_msc.open(tracker, 'r') as file:
        text = file.read().strip()
    return int(text) if text.isdecimal() else -1


def load_dense_checkpoint(
    args: Any, model: Any, optimizer: Any, scheduler: Any, context: Any
) -> None:
    """What upstream's set-up does for `--load`, after a recovery from memory proved impossible."""
    args.iteration, args.num_floating_point_operations_so_far = training.load_checkpoint(
        model, optimizer, scheduler, checkpointing_context=context
    )
