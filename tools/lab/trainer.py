# SPDX-License-Identifier: Apache-2.0
"""The trainer of measurements: `pretrain_gpt.py` with what this machine lacks, by its variables.

The only place that limits the rate of copies to host memory: a toy model on a CPU hides every
copy, large models on GPUs do not. The limit is for measurements only, so the trainer has no flag
for it. A *ballast* is a file in a tmpfs that a worker maps, as it maps the windows of a model. An
*emulated device* computes one micro-batch at a time on each node: it takes some seconds, beside the
CPU's. The trainer may be under lm-resiliency, called as that project's documentation says.
"""

import fcntl
import mmap
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MOEVEMENT_SPARES = True

BALLAST = 'MOEVEMENT_BALLAST'
"""Environment variable of a worker: the file."""
SECONDS, DEVICES = 'MOEVEMENT_DEVICE_S', 'MOEVEMENT_DEVICES'
"""The same: seconds of a micro-batch on a device; folder of the locks of devices."""

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
    from megatron.moevement.pretrain_gpt import warm_up  # noqa: F401 - for a hot spare
    from megatron.moevement.seams import patches
    from moevement_ext.capture.copier import Copier
    from moevement_ext.capture.layout import Piece
    from moevement_ext.rates import TokenBucket


def file_in(folder: Path, gigabytes: int) -> Path | None:
    """Write a ballast; None if it would be empty."""
    if not gigabytes:
        return None
    path = folder / 'ballast'
    with path.open('wb') as file:
        os.posix_fallocate(file.fileno(), 0, gigabytes * 10**9)
    return path


def _mapped() -> mmap.mmap:
    """Map the file; its pages are in this process's page table, which its death has to clear."""
    with open(os.environ[BALLAST], 'r+b') as file:
        memory = mmap.mmap(file.fileno(), 0)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE].max()
    return memory


def _on_device(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    device, seconds = Path(os.environ[DEVICES], os.environ['MOEVEMENT_NODE']), os.environ[SECONDS]

    def step(*args: Any, **named: Any) -> Any:
        with device.open('a') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            time.sleep(float(seconds))  # what is emulated, not a synchronisation
        return forward_step(*args, **named)

    return step


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
        disk_folder=os.environ[FOLDER],
        disk_flush_interval=0,
        replication_jump=1,
        pin_memory=False,
        skip_replication_if_hsdp=False,
        run_id='compare',
    )
    handle = enable_resiliency(
        *(model, optimizer, scheduler),
        interval=1,
        enable_detection=False,
        ckpt_config=config,
        extra_state_fn=position,
        load_extra_state_fn=move,
    )
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
    if DEVICES in os.environ:
        pretrain_gpt.forward_step = _on_device(pretrain_gpt.forward_step)
    ballast = _mapped() if BALLAST in os.environ else None  # noqa: F841 - mapped until the end
    sys.argv[0] = 'pretrain_gpt.py'
    pretrain_gpt.main()


if __name__ == '__main__':
    main()
