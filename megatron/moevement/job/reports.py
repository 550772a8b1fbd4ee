# SPDX-License-Identifier: Apache-2.0
"""Reports of a job: its description and losses as events, protection in the log and in plots."""

import sys
from pathlib import Path

from megatron.training import print_rank_last
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron.moevement.facts import Counters, JobFacts, Settings
from megatron.moevement.job import computing
from megatron.moevement.job.flag_rules import number
from moevement_ext.events import JobDescribed
from moevement_ext.memory.node_store import holds_windows
from moevement_ext.protect.checkpointer import SparseCheckpointer
from moevement_ext.protect.statistics import CaptureStatistics


def describe(settings: Settings, facts: JobFacts, counters: Counters) -> JobDescribed:
    """The job's description from its settings; a custom loop lacks some of them."""
    sizes = {
        'tensor': facts.tensor_model_parallel_size,
        'pipeline': facts.pipeline_model_parallel_size,
        'context': facts.context_parallel_size,
        'expert': number(settings, 'expert_model_parallel_size', 1),
    }
    on_cpu = facts.distributed_backend == 'gloo'
    return JobDescribed(
        train_iterations=counters.train_iters,
        model=_model(settings),
        layout={'ranks': facts.world_size, **sizes},
        versions={name: str(found) for name, found in computing.versions(on_cpu).items()},
        command=sys.argv,
    )


def _model(settings: Settings) -> str:
    named = (
        ('num_layers', '{} layers'),
        ('hidden_size', 'hidden size {}'),
        ('num_experts', '{} experts'),
        ('num_moe_experts', '{} experts'),
        ('moe_router_topk', 'top {}'),
        ('seq_length', 'sequences of {}'),
        ('global_batch_size', '{} of them an iteration'),
    )
    values = ((words, settings.get(name)) for name, words in named)
    return ', '.join(words.format(value) for words, value in values if value)


def log_interval(iteration: int, checkpointer: SparseCheckpointer) -> None:
    """Write one line, and scalars for TensorBoard and W&B, per log interval. All ranks call it."""
    statistics = checkpointer.statistics
    exposed_ms = statistics.exposed_ms()
    print_rank_last(_line(checkpointer, statistics, exposed_ms))
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    scalars = _scalars(checkpointer, statistics, exposed_ms) if tensorboard or wandb else {}
    if tensorboard:
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(scalars, iteration)


def forget_points_after(iteration: int) -> None:
    """Have TensorBoard drop what an earlier start wrote of iterations that are computed again.

    The writer opens another file at its next point, which begins with that order. A job that begins
    at iteration 0 leaves the files of others alone.
    """
    writer = get_tensorboard_writer()
    if writer is not None and iteration > 0:
        writer.close()
        writer.purge_step = iteration + 1


def _scalars(
    checkpointer: SparseCheckpointer, statistics: CaptureStatistics, exposed_ms: float
) -> dict[str, float]:
    values = {
        'window': checkpointer.schedule.plan.window,
        'slot-bytes': statistics.slot_bytes,
        'exposed-ms': exposed_ms,
        'skipped-windows': statistics.skipped_windows,
        'protection-reduced': statistics.failures,
        'recoveries': statistics.events.recoveries,
        'persisted': statistics.persisted,
        'on-disk': statistics.on_disk,
    }
    return {f'sparse-ckpt/{name}': value for name, value in values.items() if value is not None}


def _line(
    checkpointer: SparseCheckpointer, statistics: CaptureStatistics, exposed_ms: float
) -> str:
    persisted = 'none' if statistics.persisted is None else str(statistics.persisted)
    schedule = checkpointer.schedule
    fields = {
        'window': schedule.plan.window,
        **({'interval': schedule.period} if schedule.idle else {}),
        'slot bytes': statistics.slot_bytes,
        'exposed (ms)': f'{exposed_ms:.1f}',
        'persisted': persisted,
        **({} if statistics.on_disk is None else {'on disk': statistics.on_disk}),
        'skipped windows': statistics.skipped_windows,
        'protection reduced': statistics.failures,
        'recoveries': statistics.events.recoveries,
    }
    return ' sparse ckpt | ' + ' | '.join(f'{key}: {value}' for key, value in fields.items()) + ' |'


def exit_line(iteration: int, removed: bool, directory: Path | str) -> str:
    """The line at a planned exit, with the source for the next launch of the job.

    No thread captures any more. `directory`: of the dense checkpoint if the windows are `removed`,
    else of the windows of the run, on all nodes.
    """
    windows, hint = f'kept in {directory}', 'launch the job again, or remove the directory'
    if removed:
        windows, hint = 'removed', f'--load {directory}'
    elif not holds_windows(Path(directory)):
        windows, hint = 'none is complete', 'launch the job again, from --load or the start'
    return f' sparse ckpt | exit at iteration: {iteration} | windows: {windows} | go on: {hint} |'
