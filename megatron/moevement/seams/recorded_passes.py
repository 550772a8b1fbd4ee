# SPDX-License-Identifier: Apache-2.0
"""Runs passes that upstream records as a CUDA graph eagerly while a recovery replays.

A graph recorded during a replay would leave out the gradients of frozen operators in all later
iterations, so a replay does not count as a warm-up for it either. Graphs of single layers need no
such care: with `--cuda-graph-impl transformer_engine` upstream's loop records between two of its
own iterations, after those that a recovery replays.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from megatron.core.full_cuda_graph import FullCudaGraphWrapper

from megatron.moevement.seams import patches

_WHOLE_ITERATION = 'megatron.core.full_cuda_graph:FullCudaGraphWrapper.__call__'


def computed() -> AbstractContextManager[None]:
    """Neither record nor run CUDA graphs within the context. Training thread only."""
    return patches.wrapped(_WHOLE_ITERATION, _compute)


def _compute(
    _: Callable[..., object], recorder: FullCudaGraphWrapper, **schedule: object
) -> object:
    return recorder.forward_backward_func(**schedule)
