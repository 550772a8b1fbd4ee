# SPDX-License-Identifier: Apache-2.0
"""What sparse checkpointing says in the log and in TensorBoard."""

from typing import Any

from megatron.training import print_rank_last
from megatron.training.global_vars import get_tensorboard_writer

from moevement_ext.protect.checkpointer import SparseCheckpointer
from moevement_ext.protect.statistics import CaptureStatistics


def log_interval(iteration: int, checkpointer: SparseCheckpointer) -> None:
    """One line, and scalars for TensorBoard, per log interval. All ranks call it."""
    statistics = checkpointer.statistics
    exposed_ms = statistics.exposed_ms()
    print_rank_last(_line(checkpointer, statistics, exposed_ms))
    writer = get_tensorboard_writer()
    if writer:
        window = checkpointer.schedule.plan.window
        writer.add_scalar('sparse-ckpt/window', window, iteration)
        writer.add_scalar('sparse-ckpt/slot-bytes', statistics.slot_bytes, iteration)
        writer.add_scalar('sparse-ckpt/exposed-ms', exposed_ms, iteration)
        writer.add_scalar('sparse-ckpt/skipped-windows', statistics.skipped_windows, iteration)
        writer.add_scalar('sparse-ckpt/failures', statistics.failures, iteration)
        if statistics.persisted is not None:
            writer.add_scalar('sparse-ckpt/persisted', statistics.persisted, iteration)
        if statistics.on_disk is not None:
            writer.add_scalar('sparse-ckpt/on-disk', statistics.on_disk, iteration)


def _line(
    checkpointer: SparseCheckpointer, statistics: CaptureStatistics, exposed_ms: float
) -> str:
    persisted = 'none' if statistics.persisted is None else str(statistics.persisted)
    fields = {
        'window': checkpointer.schedule.plan.window,
        'slot bytes': statistics.slot_bytes,
        'exposed (ms)': f'{exposed_ms:.1f}',
        'persisted': persisted,
        **({} if statistics.on_disk is None else {'on disk': statistics.on_disk}),
        'skipped windows': statistics.skipped_windows,
        'failures': statistics.failures,
    }
    return ' sparse ckpt | ' + ' | '.join(f'{key}: {value}' for key, value in fields.items()) + ' |'


def exit_line(iteration: int, removed: bool, directory: Any) -> str:
    """Says at an exit that upstream's flags planned what the job can go on from."""
    windows, hint = f'kept in {directory}', 'launch the job again, or remove the directory'
    if removed:
        windows, hint = 'removed', f'--load {directory}'
    return f' sparse ckpt | exit at iteration: {iteration} | windows: {windows} | go on: {hint} |'
