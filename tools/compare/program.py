# SPDX-License-Identifier: Apache-2.0
"""The trainer of a comparison: `pretrain_gpt.py` that logs its start and may copy slowly.

The only place that limits the rate of copies to host memory: a toy model on a CPU hides every
copy, large models on GPUs do not. The limit is for measurements only, so the trainer has no flag
for it.
"""

import multiprocessing
import os
import sys
import time
from typing import Any

from megatron.moevement.seams import starting

MOEVEMENT_SPARES = True
starting.prepare(sys.argv[1:] if __name__ == '__main__' else None)

COPY_GB_PER_S = 'MOEVEMENT_COMPARE_COPY_GB_PER_S'
"""Environment variable: limit, in GB/s, of each rank's copies to host memory; unset: no limit."""
FORK = 'MOEVEMENT_COMPARE_FORK'
"""Environment variable: if set, processes with which Megatron saves are forks, like the workers."""
STARTED = 'compare: program started at '
"""Line of a log, before the time in seconds since the epoch."""

if __name__ != '__mp_main__':  # a subprocess, e.g. one that writes a checkpoint, is not a worker
    import torch.multiprocessing

    from megatron.moevement import pretrain_gpt
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


def main() -> None:
    print(f'{STARTED}{time.time():.3f}', flush=True)
    if (limit := os.environ.get(COPY_GB_PER_S)) is not None:
        limit_copies(1e9 * float(limit))
    if FORK in os.environ:
        fork_helpers()
    sys.argv[0] = 'pretrain_gpt.py'
    pretrain_gpt.main()


if __name__ == '__main__':
    main()
