# SPDX-License-Identifier: Apache-2.0
"""Access to upstream's trainer: groups, counts, dense checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import megatron.training.training as training
import msgspec
from megatron.core.optimizer.optimizer import MTP_GRAD_NORM_GROUP, SEPARATE_GRAD_NORM_GROUPS
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron.moevement.facts import (
    Chunks,
    Counters,
    MegatronOptimizer,
    OptimizerParamScheduler,
    TransformerConfig,
)
from megatron.moevement.seams import patches
from moevement_ext.membership.exchange import Exchange
from moevement_ext.regroup.process_groups import stand_in_for


def groups() -> object:
    """Process groups that upstream's schedules use by default."""
    return schedules._build_default_pg_collection()


@contextmanager
def setting(name: str, value: object) -> Iterator[None]:
    """Set one of upstream's arguments to another value within the context."""
    settings = vars(training.get_args())
    before = settings[name]
    settings[name] = value
    try:
        yield
    finally:
        settings[name] = before


@contextmanager
def without_connections(backend: str) -> Iterator[None]:
    """Create process groups without connections within the context.

    For a process that joins a running job: the other ranks take no part in its set-up. The groups
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
    """Set values that an optimizer would determine by a collective in its first step.

    The value is whether any rank has parameters with a separate gradient norm: those of detached
    multi-token prediction layers. Survivors have run that collective long ago, a new process has
    not, and before the first update no rank has. A rank that ran it alone within an iteration would
    wait forever.
    """
    assert SEPARATE_GRAD_NORM_GROUPS == (MTP_GRAD_NORM_GROUP,)
    optimizer._has_grad_norm_group_cache = {MTP_GRAD_NORM_GROUP: detaches_heads(config)}


def detaches_heads(config: TransformerConfig) -> bool:
    """True if multi-token prediction layers, on any stage, have a separate gradient norm."""
    return bool(config.mtp_num_layers and config.mtp_detach_heads)


def clear_metrics() -> None:
    """Drop the metrics that upstream has accumulated for its log."""
    get_moe_metrics_tracker().clear()
    MTPLossLoggingHelper.clean_metrics_in_tracker()
    training.stimer.reset()


def switch_detector_as_launched() -> None:
    """Set `--log-straggler` on or off as the flags say, whatever an operator has switched since.

    A new process does not know of that; ranks that differ make different collectives in a report.
    """
    detector = training.stimer
    if detector.world:  # it is configured, and there is a GPU
        off = training.get_args().disable_straggler_on_startup
        start = detector.null_method if off else detector.start_method
        stop = detector.null_method if off else detector.stop_method
        vars(detector).update({'_off': off, 'start': start, 'stop': stop})


def floating_point_operations() -> float:
    """Upstream's number of operations to train on one sample of full length."""
    return float(training.num_floating_point_operations(training.get_args(), 1))


def saved_iteration(save: str | None) -> int:
    """Iteration of the newest dense checkpoint in `--save`, -1 if there is none."""
    text = None if save is None else tracked(save)
    return int(text) if text is not None and text.isdecimal() else -1


def tracked(directory: str) -> str | None:
    """Content of the tracker file in a directory of dense checkpoints; None without a file."""
    from megatron.training.checkpointing import get_checkpoint_tracker_filename, maybe_msc

    tracker = get_checkpoint_tracker_filename(directory)
    if not maybe_msc.os.path.isfile(tracker):
        return None
    with maybe_msc.open(tracker, 'r') as file, suppress(UnicodeDecodeError):
        return str(file.read()).strip()
    return 'bytes that are no text'


def consumed_of_the_phase() -> int:
    """Consumed training samples at which upstream opens its loader.

    With `--phase-transition-iterations` the data restarts at each of these iterations.
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
    """Do upstream's set-up for `--load`, after a recovery from memory proved impossible."""
    counters.iteration, counters.num_floating_point_operations_so_far = training.load_checkpoint(
        model, optimizer, scheduler, checkpointing_context=context
    )


# The settings that a group overrides in the optimizer, and whether its parameters are experts'.
_Key = tuple[tuple[tuple[str, bool | int | float | str | None], ...] | None, bool]


_KEYS = msgspec.msgpack.Decoder(list[_Key])


@contextmanager
def groups_of_all_ranks(exchange: Exchange) -> Iterator[None]:
    """Build optimizers within the context with the parameter groups of all ranks of the job.

    Upstream gathers the group keys of all ranks, so that a rank also has empty groups and
    optimizers for parameters that only other ranks hold: all ranks then make the same reductions in
    a step. A process that joins a running job cannot gather.
    """
    numbers = count()

    def build_aligned(build: Callable[..., object], *args: object, **kwargs: object) -> object:
        name = f'parameter-groups/{next(numbers)}'

        def gather(_: Any, found: list[Any], own: list[_Key], group: Any = None) -> None:
            encoded = exchange(name, msgspec.msgpack.encode(own))
            found[:] = [_KEYS.decode(keys) for keys in encoded]

        with patches.wrapped('torch.distributed:all_gather_object', gather):
            return build(*args, **kwargs)

    with patches.wrapped('megatron.core.optimizer:_get_param_groups', build_aligned):
        yield
