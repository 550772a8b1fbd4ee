# SPDX-License-Identifier: Apache-2.0
"""The model for measurements on a CPU: an 8-expert GPT of 7.4 million parameters.

It is larger than the demo's model, so that computation outweighs the interpreter's overhead. Two
emulated nodes of one rank form one pipeline stage of 2 expert-parallel ranks. Every window has a
replica on the other node, as on a cluster; here the replica travels over loopback.
"""

from pathlib import Path

from ..lab import models, precisions

RUN_ID = 'bench'
NODES = 2

_MODEL = models.ToyModel(hidden=256, heads=4, sequence=128, experts=8)
_TRAINING = (
    '--num-layers 4 --untie-embeddings-and-output-weights --micro-batch-size 4 '
    '--global-batch-size 16 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 2 --lr-decay-iters 200 '
    '--clip-grad 1.0'
).split()


def training_flags(data: Path, iterations: int, precision: str | None = None) -> list[str]:
    """Flags of plain Megatron.

    `precision`: a key of `precisions.FLAGS` or `NATIVE`; None: `models.native_precision`.
    """
    kind = (precisions.FLAGS | precisions.NATIVE)[precision or models.native_precision()]
    own = [*_TRAINING, *kind.split(), '--expert-model-parallel-size', str(NODES)]
    return _MODEL.training_flags(own, data, iterations)


def staged_flags(
    data: Path, stages: int, iterations: int, precision: str | None = None
) -> list[str]:
    """The same for one pipeline stage on each rank; the last value of a flag counts."""
    layout = ['--pipeline-model-parallel-size', str(stages), '--expert-model-parallel-size', '1']
    return training_flags(data, iterations, precision) + layout
