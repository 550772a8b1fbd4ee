# SPDX-License-Identifier: Apache-2.0
"""The jobs of the programs: 8-expert GPTs of which one shows, and a larger one is measured.

The first has 2 pipeline stages x 2 expert-parallel ranks. The other has 7.4 million parameters, so
that computation outweighs the interpreter's overhead. Two emulated nodes of one rank form one
pipeline stage of 2 expert-parallel ranks. Every window has a replica on the other node, as on a
cluster; here the replica travels over loopback.
"""

from pathlib import Path

from . import models, precisions

RUN_ID = 'bench'
NODES = 2
WORKERS_PER_NODE = 2
WORLD_SIZE = NODES * WORKERS_PER_NODE
STAGE_RANKS = ((0, 1), (2, 3))
"""Ranks by pipeline stage of the first. Two workers per node: each node runs one stage."""

_SHOWN = models.ToyModel(hidden=64, heads=4, sequence=64, experts=8)
_MEASURED = models.ToyModel(hidden=256, heads=4, sequence=128, experts=8)
_TRAINING = (
    '--num-layers 4 --untie-embeddings-and-output-weights --global-batch-size 16 --clip-grad 1.0 '
    '--expert-model-parallel-size 2 --lr-warmup-iters 2 '
)
_OF_SHOWN = (
    '--pipeline-model-parallel-size 2 --micro-batch-size 2 --lr 3e-3 --min-lr 3e-4 '
    '--lr-decay-iters 100 '
)
_OF_MEASURED = '--micro-batch-size 4 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 200 '


def training_flags(data: Path, iterations: int, precision: str = 'bf16') -> list[str]:
    """Flags of plain Megatron. `precision`: a key of `precisions.NATIVE`."""
    own = f'{_TRAINING}{_OF_SHOWN}{precisions.NATIVE[precision]}'.split()
    return _SHOWN.training_flags(own, data, iterations)


def measured_flags(
    data: Path, iterations: int, precision: str | None = None, stages: int | None = None
) -> list[str]:
    """The same of the larger one; the last value of a flag counts.

    `precision`: a key of `precisions.FLAGS` or `NATIVE`; None: `models.native_precision`. `stages`:
    so many, of one rank each.
    """
    kind = (precisions.FLAGS | precisions.NATIVE)[precision or models.native_precision()]
    own = f'{_TRAINING}{_OF_MEASURED}{kind}'.split()
    staged = f'--pipeline-model-parallel-size {stages} --expert-model-parallel-size 1'
    layout = staged.split() if stages else []
    return _MEASURED.training_flags(own, data, iterations) + layout
