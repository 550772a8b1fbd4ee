# SPDX-License-Identifier: Apache-2.0
"""Passes that upstream records as a CUDA graph are computed as usual while a recovery replays.

A graph that is recorded then would leave out the gradients of frozen operators for good, so what a
replay runs does not count as a warm-up for it either. Graphs of single layers need nothing of this:
with `--cuda-graph-impl transformer_engine` upstream's loop records between two iterations of its
own, after those that a recovery replays.

Checked against megatron-core 0.19.2.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from megatron.core.full_cuda_graph import FullCudaGraphWrapper

from megatron.moevement.seams import patches

_WHOLE_ITERATION = 'megatron.core.full_cuda_graph:FullCudaGraphWrapper.__call__'


def computed() -> AbstractContextManager[None]:
    """Within the context nothing is recorded, and nothing recorded is run. Training thread only."""
    return patches.wrapped(_WHOLE_ITERATION, _compute)


def _compute(
    _: Callable[..., object], recorder: FullCudaGraphWrapper, **schedule: object
) -> object:
    return recorder.forward_backward_func(**schedule)
