# SPDX-License-Identifier: Apache-2.0
"""The model of the jobs, and its layouts; an iteration takes a fraction of a second."""

import math
from typing import NamedTuple

from ..lab import models

RUN_ID = 'chaos'

SAMPLES = 4
"""Samples of an iteration; of the first one if the batch grows."""
_LAYERS = 4
SEQUENCE = 32
"""Tokens per sample."""
_MODEL = models.ToyModel(hidden=32, heads=2, sequence=SEQUENCE, experts=4)
# The clip is far below the gradient norm, so it acts in every step; the learning rate warms up and
# decays.
_TRAINING = '--micro-batch-size 1 --lr 2e-3 --min-lr 1e-4 --clip-grad 0.5'.split()
COMMON_FLAGS = [*_MODEL.flags(), *models.TRAINING, *_TRAINING, *models.TEXT]
"""Megatron's flags that every configuration has."""


class Layout(NamedTuple):
    """Distribution of the model over ranks."""

    name: str
    pp: int = 1
    vp: int = 1
    """Model chunks on each pipeline stage."""
    tp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        return self.pp * self.tp * self.dp

    def flags(self) -> list[str]:
        chunks = self.pp * self.vp
        layers = math.ceil(_LAYERS / chunks) * chunks
        flags = ['--num-layers', str(layers)]
        flags += ['--pipeline-model-parallel-size', str(self.pp)]
        flags += ['--expert-model-parallel-size', str(self.ep)]
        if self.tp > 1:
            flags += ['--tensor-model-parallel-size', str(self.tp), '--sequence-parallel']
        if self.vp > 1:
            flags += ['--num-layers-per-virtual-pipeline-stage', str(layers // chunks)]
        return flags


def parse_layout(text: str) -> Layout:
    """A layout such as `pp2-ep2`; the ranks of `ep` are data-parallel too."""
    sizes = {part[:2]: int(part[2:]) for part in text.split('-')}
    return Layout(text, **{'dp': sizes.get('ep', 1), **sizes})
