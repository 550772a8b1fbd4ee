# SPDX-License-Identifier: Apache-2.0
"""The model that is struck: a GPT so small that an iteration takes a fraction of a second."""

import math
import re
from pathlib import Path
from typing import NamedTuple

RUN_ID = 'chaos'
HANG_TIMEOUT_S = 5

_LAYERS = 4
_SAMPLES = 8
_SIZES = ('pp', 'vp', 'tp', 'ep', 'dp')
_LAYOUT = re.compile(rf'(?:{"|".join(_SIZES)})\d+(?:-(?:{"|".join(_SIZES)})\d+)*')
_CPU = (
    '--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion '
    '--no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion '
    '--no-bias-gelu-fusion --no-bias-dropout-fusion'
)
_MODEL = (
    '--hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 '
    '--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear '
    '--untie-embeddings-and-output-weights --num-experts 4 --moe-router-topk 2 '
    '--moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 '
    '--moe-router-load-balancing-type aux_loss'
)
# The clip is far below the gradient norm, so it acts in every step; the rate warms up and decays.
_TRAINING = (
    '--bf16 --use-distributed-optimizer --micro-batch-size 1 --lr 2e-3 --min-lr 1e-4 '
    '--lr-decay-style cosine --lr-warmup-iters 3 --lr-decay-iters 200 --weight-decay 0.1 '
    '--clip-grad 0.5 --seed 1234 --log-interval 1 --eval-interval 1000000 --eval-iters 0 '
    '--distributed-timeout-minutes 3'
)
_DATA = '--tokenizer-type NullTokenizer --vocab-size 257 --split 90,5,5 --num-workers 0'


class Layout(NamedTuple):
    """How the model is spread over ranks."""

    name: str
    pp: int = 1
    vp: int = 1
    """Model chunks on each pipeline stage."""
    tp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        """Number of workers."""
        return self.pp * self.tp * self.dp

    def flags(self) -> list[str]:
        """Flags of Megatron."""
        chunks = self.pp * self.vp
        layers = math.ceil(_LAYERS / chunks) * chunks
        flags = ['--num-layers', str(layers), '--global-batch-size', str(_SAMPLES)]
        flags += ['--pipeline-model-parallel-size', str(self.pp)]
        flags += ['--expert-model-parallel-size', str(self.ep)]
        if self.tp > 1:
            flags += ['--tensor-model-parallel-size', str(self.tp), '--sequence-parallel']
        if self.vp > 1:
            flags += ['--num-layers-per-virtual-pipeline-stage', str(layers // chunks)]
        return flags


def parse_layout(text: str) -> Layout:
    """A layout such as `pp2-ep2`; the ranks of `ep` are data-parallel too.

    Raises:
        ValueError: what is wrong with it.
    """
    if _LAYOUT.fullmatch(text) is None:
        raise ValueError(f'{text!r}: must be sizes such as pp2-ep2, pp4, pp2-vp2 or pp2-tp2')
    sizes = {part[:2]: int(part[2:]) for part in text.split('-')}
    sizes.setdefault('dp', sizes.get('ep', 1))
    layout = Layout(text, **sizes)
    if min(layout[1:]) < 1:
        raise ValueError(f'{text!r}: every size must be at least 1')
    if layout.dp % layout.ep:
        raise ValueError(f'{text!r}: dp must be a multiple of ep')
    if _SAMPLES % layout.dp:
        raise ValueError(f'{text!r}: dp must divide the {_SAMPLES} samples of an iteration')
    return layout


def training_flags(layout: Layout, data: Path, iterations: int, digest: Path) -> list[str]:
    """Flags of the run that nothing happens to.

    Args:
        layout: of the model.
        data: prefix of the text.
        iterations: to train.
        digest: file for the digest of the final state.
    """
    return [
        *f'{_CPU} {_MODEL} {_TRAINING} {_DATA}'.split(),
        *layout.flags(),
        *('--data-path', str(data), '--data-cache-path', str(data.parent / 'cache')),
        *('--train-iters', str(iterations), '--sparse-ckpt-digest', str(digest)),
    ]


def sparse_flags(memory: Path, window: int, events: Path) -> list[str]:
    """What a run that is struck has besides.

    Args:
        memory: directory in a tmpfs.
        window: W.
        events: folder for the events.
    """
    return [
        *('--sparse-ckpt', '--sparse-ckpt-strict', '--sparse-ckpt-window', str(window)),
        *('--sparse-ckpt-dir', str(memory), '--sparse-ckpt-run-id', RUN_ID),
        *('--sparse-ckpt-events', str(events)),
        *('--sparse-ckpt-hang-timeout', str(HANG_TIMEOUT_S)),
    ]
