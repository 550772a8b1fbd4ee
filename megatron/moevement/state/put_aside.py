# SPDX-License-Identifier: Apache-2.0
"""Drops data that an interrupted iteration has queued for its own later steps.

Queues in modules outlive the iteration. The next one would take the entries of the interrupted one
first, and its own entries one micro-batch late, for the rest of the job. A dense save, too, has a
queue.

Checked against Transformer Engine 2.20.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron.moevement.built import Chunks

QUEUE = 'wgrad_store'
"""Attribute of layers of Transformer Engine: operands of weight gradients that are computed later
(`--delay-wgrad-compute`)."""
STASH = 'fp8_tensors_recompute_buffer'
"""Scales of delayed scaling in the first forward pass, for a recomputation."""
FIRST = '_is_first_fp8_module'
"""Whether a recomputed part begins with the first fp8 layer."""
# Lists of upstream's output layer (`--defer-embedding-wgrad-compute`).
_OF_OUTPUT = ('embedding_activation_buffer', 'grad_output_buffer')


def drop_put_aside(model: Chunks) -> None:
    """Empty all these queues. Training thread, between two iterations."""
    for module in _modules(model):
        store = getattr(module, QUEUE, None)
        if store is not None and store.context is not None:
            store.context.queue.clear()
        for name in _OF_OUTPUT:
            if isinstance(buffer := getattr(module, name, None), list):
                buffer.clear()
    for queue in _of_recomputations():
        queue.clear()
    with suppress(OSError, EOFError):  # the process that holds the queue is gone: no save succeeds
        _drop_results_of_writing()


def _drop_results_of_writing() -> None:
    """Drop the results of files that a dense save has written.

    Between writing and reading the results a rank waits for the others. A result that is left is
    read by the next save, also if the writing of that save fails.
    """
    results = filesystem_async._results_queue
    while results is not None and not results.empty():
        results.get_nowait()


def _modules(model: Chunks) -> Iterator[torch.nn.Module]:
    for chunk in model:
        for module in chunk.modules():
            yield module
            # Upstream keeps these layers, which share the weights, out of the tree of modules.
            for fused in getattr(module, '_fused_ops', None) or ():
                yield from fused.modules()


def _of_recomputations() -> Iterator[Any]:
    quantization = sys.modules.get('transformer_engine.pytorch.quantization')
    if quantization is None:
        return
    manager = quantization.FP8GlobalStateManager
    yield from getattr(getattr(manager, 'quantization_state', manager), STASH)
    recomputation = sys.modules['transformer_engine.pytorch.distributed']
    yield getattr(recomputation.activation_recompute_forward, FIRST)
