# SPDX-License-Identifier: Apache-2.0
"""What the adapter asks of upstream's trainer: groups, counts, dense checkpoints.

Checked against megatron-core 0.19.2.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import megatron.training.training as training
from megatron.core.optimizer.optimizer import MTP_GRAD_NORM_GROUP, SEPARATE_GRAD_NORM_GROUPS
from megatron.core.pipeline_parallel import schedules

from megatron.moevement.built import (
    Chunks,
    MegatronOptimizer,
    OptimizerParamScheduler,
    TransformerConfig,
)
from megatron.moevement.counters import Counters
from megatron.moevement.seams import patches
from moevement_ext.regroup.process_groups import stand_in_for


def groups() -> object:
    """The process groups that upstream's schedules use when they are given none."""
    return schedules._build_default_pg_collection()


@contextmanager
def setting(name: str, value: object) -> Iterator[None]:
    """Within the context upstream's arguments have another value."""
    settings = vars(training.get_args())
    before = settings[name]
    settings[name] = value
    try:
        yield
    finally:
        settings[name] = before


@contextmanager
def without_connections(backend: str) -> Iterator[None]:
    """Within the context, set-up makes process groups that talk to nobody.

    For a process that joins a running job: the others do not take part in its set-up. The groups
    are connected later, in place, by `backend`.
    """

    def new_fake_group(
        new_group: Callable[..., object], *given: object, **kwargs: object
    ) -> object:
        return new_group(*given, **kwargs | {'backend': 'fake'})

    stand_in_for(backend)
    with patches.wrapped('torch.distributed:new_group', new_fake_group):
        yield


def fill_first_step_caches(optimizer: MegatronOptimizer, config: TransformerConfig) -> None:
    """Tell an optimizer what it finds out together with others in its first step.

    That is whether any rank has parameters with a gradient norm of their own: those of layers that
    predict more tokens, where they are detached from the rest. Some ranks may have asked the
    others long ago, new ones never, and none before the first update: whoever still had to ask in
    an iteration would wait for the rest for ever.

    Args:
        optimizer: upstream's.
        config: of the model.
    """
    assert SEPARATE_GRAD_NORM_GROUPS == (MTP_GRAD_NORM_GROUP,)
    optimizer._has_grad_norm_group_cache = {MTP_GRAD_NORM_GROUP: detaches_heads(config)}


def detaches_heads(config: TransformerConfig) -> bool:
    """Layers that predict more tokens have a gradient norm of their own, on whichever stage."""
    return bool(config.mtp_num_layers and config.mtp_detach_heads)


def floating_point_operations() -> float:
    """What upstream counts for training on one sample of full length."""
    return float(training.num_floating_point_operations(training.get_args(), 1))


def saved_iteration(save: str | None) -> int:
    """Iteration of the newest dense checkpoint in `--save`, -1 if there is none."""
    from megatron.training.checkpointing import get_checkpoint_tracker_filename, maybe_msc

    if save is None:
        return -1
    tracker = get_checkpoint_tracker_filename(save)
    if not maybe_msc.os.path.isfile(tracker):
        return -1
    with maybe_msc.open(tracker, 'r') as file:
        text = file.read().strip()
    return int(text) if text.isdecimal() else -1


def consumed_of_the_phase() -> int:
    """Training samples that upstream opens its loader after.

    With `--phase-transition-iterations` data begin anew at each of these iterations.
    """
    args = training.get_args()
    transitions = args.phase_transition_iterations or ()
    begun_at = max(it for it in (0, *transitions) if it <= args.iteration)
    return int(args.consumed_train_samples - begun_at * args.global_batch_size)


def load_dense_checkpoint(
    counters: Counters,
    model: Chunks,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    context: object,
) -> None:
    """What upstream's set-up does for `--load`, after a recovery from memory proved impossible."""
    counters.iteration, counters.num_floating_point_operations_so_far = training.load_checkpoint(
        model, optimizer, scheduler, checkpointing_context=context
    )
