# SPDX-License-Identifier: Apache-2.0
"""The model that is measured on the CPU: an 8-expert GPT of 7.4 million parameters.

It is larger than that of the demo, so that an iteration is compute and not overhead of the
interpreter. Two emulated nodes; with 4 ranks there are 2 pipeline stages of 2 expert-parallel
ranks, with 2 ranks one such stage. Every window has a replica on the other node, as on a cluster;
here it travels over loopback.
"""

from pathlib import Path

from tools.lab import models, precisions

RANKS = (2, 4)
RUN_ID = 'bench'
NODES = 2

_MODEL = models.ToyModel(hidden=256, heads=4, sequence=128, experts=8)
_TRAINING = (
    '--num-layers 4 --untie-embeddings-and-output-weights --micro-batch-size 4 '
    '--global-batch-size 16 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 2 --lr-decay-iters 200 '
    '--clip-grad 1.0'
).split()


def training_flags(data: Path, ranks: int, iterations: int, precision: str = 'bf16') -> list[str]:
    """Flags of plain Megatron.

    Args:
        data: prefix of the text.
        ranks: one of `RANKS`.
        iterations: to train.
        precision: one of `precisions.FLAGS`.
    """
    return [
        *_MODEL.flags(),
        *models.TRAINING,
        *_TRAINING,
        *precisions.FLAGS[precision].split(),
        *models.TEXT,
        *models.NO_EVALUATION,
        *('--pipeline-model-parallel-size', str(ranks // NODES)),
        *('--expert-model-parallel-size', '2'),
        *models.data_flags(data),
        *('--train-iters', str(iterations)),
    ]


def sparse_flags(memory: Path, window: str) -> list[str]:
    """Sparse checkpointing with windows of `window` iterations, which may be `auto`."""
    return models.sparse_flags(memory, RUN_ID, window)
