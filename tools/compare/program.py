# SPDX-License-Identifier: Apache-2.0
"""The trainer of a comparison: `pretrain_gpt.py` that logs its start and may copy slowly.

The only place that limits the rate of copies to host memory: a toy model on a CPU hides every
copy, large models on GPUs do not. The limit is for measurements only, so the trainer has no flag
for it. The trainer may be under lm-resiliency, called as that project's documentation says.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from typing import Any

MOEVEMENT_SPARES = True

COPY_GB_PER_S = 'MOEVEMENT_COMPARE_COPY_GB_PER_S'
"""Environment variable: limit, in GB/s, of each rank's copies to host memory; unset: no limit."""
FORK = 'MOEVEMENT_COMPARE_FORK'
"""Environment variable: if set, processes with which Megatron saves are forks, like the workers."""
FOLDER = 'MOEVEMENT_COMPARE_FOLDER'
"""Environment variable: the folder of lm-resiliency, if that protects the trainer."""
STARTED = 'compare: program started at '
"""Line of a log, before the time in seconds since the epoch."""

_IS_PROGRAM = not __package__  # otherwise a tool has imported it, for the names above
if _IS_PROGRAM:
    from megatron.moevement.seams import starting

    starting.prepare(sys.argv[1:] if __name__ == '__main__' else None)

if (
    _IS_PROGRAM and __name__ != '__mp_main__'
):  # a subprocess, e.g. one that writes a checkpoint, is not a worker
    import torch.multiprocessing
    from megatron.training import get_args, training

    from megatron.moevement import pretrain_gpt
    from megatron.moevement.seams import patches
    from moevement_ext.capture.copier import Copier
    from moevement_ext.capture.layout import Piece
    from moevement_ext.rates import TokenBucket


def limit_copies(bytes_per_s: float) -> None:
    """Delay the copying thread of this process after each piece; uses no CPU time."""
    issue, bucket = Copier._issue, TokenBucket(time.sleep)

    def slowly(copier: 'Copier', piece: 'Piece') -> None:
        issue(copier, piece)
        bucket.take(piece.nbytes, bytes_per_s)

    Copier._issue = slowly  # type: ignore[method-assign, assignment]


def fork_helpers() -> None:
    """Fork the processes that save: otherwise a restarted worker's first save waits for imports."""
    fork = multiprocessing.get_context('fork')
    modules: tuple[Any, ...] = (multiprocessing, torch.multiprocessing)
    for module in modules:
        module.get_context = lambda *_: fork


def set_up(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hand model, optimizer and scheduler to lm-resiliency, which may load them."""
    from lm_resiliency import InMemoryCkptConfig
    from lm_resiliency.integrations.megatron import enable_resiliency

    model, optimizer, scheduler = original(*args, **kwargs)
    counters = get_args()

    def position() -> dict[str, Any]:
        micro_batches = training.get_num_microbatches()
        samples = counters.data_parallel_size * counters.micro_batch_size * micro_batches
        return {
            'iteration': int(counters.curr_iteration) + 1,
            'samples': int(counters.consumed_train_samples) + samples,
            'scheduler': scheduler.state_dict(),
        }

    def move(value: dict[str, Any]) -> None:
        counters.iteration = counters.curr_iteration = value['iteration']
        counters.consumed_train_samples = value['samples']
        scheduler.load_state_dict(value['scheduler'])
        training.update_num_microbatches(value['samples'], consistency_check=False)

    config = InMemoryCkptConfig(
        disk_folder=os.environ[FOLDER], disk_flush_interval=0, replication_jump=1,
        pin_memory=False, skip_replication_if_hsdp=False, run_id='compare',
    )  # fmt: skip
    handle = enable_resiliency(
        model, optimizer, scheduler, interval=1, enable_detection=False, ckpt_config=config,
        extra_state_fn=position, load_extra_state_fn=move,
    )  # fmt: skip
    counters.iteration = counters.curr_iteration = max(counters.iteration, handle.step_count)
    return model, optimizer, scheduler


def main() -> None:
    print(f'{STARTED}{time.time():.3f}', flush=True)
    if (limit := os.environ.get(COPY_GB_PER_S)) is not None:
        limit_copies(1e9 * float(limit))
    if FORK in os.environ:
        fork_helpers()
    if FOLDER in os.environ:
        patches.wrap('megatron.training.training:setup_model_and_optimizer', set_up)
    sys.argv[0] = 'pretrain_gpt.py'
    pretrain_gpt.main()


if __name__ == '__main__':
    main()
