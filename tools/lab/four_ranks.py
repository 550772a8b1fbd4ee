# SPDX-License-Identifier: Apache-2.0
"""The model of the demo: an 8-expert GPT on 2 pipeline stages x 2 expert-parallel ranks."""

from pathlib import Path

from . import models, precisions

NODES = 2
WORKERS_PER_NODE = 2
WORLD_SIZE = NODES * WORKERS_PER_NODE
STAGE_RANKS = ((0, 1), (2, 3))
"""Ranks by pipeline stage. Two workers per node: each node runs one stage."""

MODEL = models.ToyModel(hidden=64, heads=4, sequence=64, experts=8)
_TRAINING = (
    '--num-layers 4 --untie-embeddings-and-output-weights '
    '--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --micro-batch-size 2 '
    '--global-batch-size 16 --lr 3e-3 --min-lr 3e-4 --lr-warmup-iters 2 --lr-decay-iters 100 '
    '--clip-grad 1.0'
).split()


def training_flags(data: Path, iterations: int, precision: str = 'bf16') -> list[str]:
    """Flags of plain Megatron. `precision`: a key of `precisions.NATIVE`."""
    own = [*_TRAINING, *precisions.NATIVE[precision].split()]
    return MODEL.training_flags(own, data, iterations)
