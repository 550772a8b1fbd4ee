# SPDX-License-Identifier: Apache-2.0
"""The model that is measured on the CPU, and the flags of each way to protect it.

An 8-expert GPT of 7.4 million parameters, larger than that of the demo, so that an iteration is
compute and not overhead of the interpreter. Two emulated nodes; with 4 ranks there are 2 pipeline
stages of 2 expert-parallel ranks, with 2 ranks one such stage. Every window has a replica on the
other node, as on a cluster; here it travels over loopback.
"""

import subprocess
import sys
from pathlib import Path

from tools.demo.failure import DemoError
from tools.demo.job import NODES, ROOT

RANKS = (2, 4)
RUN_ID = 'bench'

_DATA_MB = 4
_CPU = (
    '--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion '
    '--no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion '
    '--no-bias-gelu-fusion --no-bias-dropout-fusion'
)
_MODEL = (
    '--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 '
    '--max-position-embeddings 128 --position-embedding-type rope --normalization RMSNorm --swiglu '
    '--disable-bias-linear --untie-embeddings-and-output-weights --num-experts 8 '
    '--moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-aux-loss-coeff 1e-2 '
    '--moe-router-load-balancing-type aux_loss --moe-token-dispatcher-type alltoall'
)
_TRAINING = (
    '--bf16 --use-distributed-optimizer --micro-batch-size 4 --global-batch-size 16 --lr 1e-3 '
    '--min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 200 '
    '--weight-decay 0.1 --clip-grad 1.0 --seed 1234 --log-interval 1 --eval-interval 1000000 '
    '--eval-iters 0 --distributed-timeout-minutes 3'
)
_DATA = '--tokenizer-type NullTokenizer --vocab-size 257 --split 90,5,5 --num-workers 0'


def prepare_data(folder: Path) -> Path:
    """Text of the standard library as byte tokens, written once; returns its prefix.

    Raises:
        DemoError: it cannot be written.
    """
    prefix = folder / 'stdlib'
    if not prefix.with_suffix('.idx').exists():
        command = [sys.executable, str(ROOT / 'tools' / 'prepare_data.py')]
        command += ['--output-prefix', str(prefix), '--limit-mb', str(_DATA_MB)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise DemoError('the text could not be prepared', done.stderr)
    return prefix


def training_flags(data: Path, ranks: int, iterations: int, digest: Path) -> list[str]:
    """Flags of plain Megatron.

    Args:
        data: prefix of the text.
        ranks: one of `RANKS`.
        iterations: to train.
        digest: file for the digest of the final state.
    """
    stages = ranks // len(NODES)
    return [
        *f'{_CPU} {_MODEL} {_TRAINING} {_DATA}'.split(),
        *('--pipeline-model-parallel-size', str(stages), '--expert-model-parallel-size', '2'),
        *('--data-path', str(data), '--data-cache-path', str(data.parent / 'cache')),
        *('--train-iters', str(iterations), '--sparse-ckpt-digest', str(digest)),
    ]


def sparse_flags(memory: Path, window: str, events: Path) -> list[str]:
    """Sparse checkpointing.

    Args:
        memory: directory in a tmpfs.
        window: W, or `auto`.
        events: folder for the events.
    """
    return [
        *('--sparse-ckpt', '--sparse-ckpt-strict', '--sparse-ckpt-window', window),
        *('--sparse-ckpt-dir', str(memory), '--sparse-ckpt-run-id', RUN_ID),
        *('--sparse-ckpt-events', str(events)),
    ]


def dense_flags(checkpoints: Path, interval: int, asynchronous: bool) -> list[str]:
    """Megatron's own checkpoints on disk, resumed from if there are any."""
    flags = ['--save', str(checkpoints), '--load', str(checkpoints), '--ckpt-format', 'torch_dist']
    flags += ['--save-interval', str(interval)]
    if asynchronous:
        # Upstream saves asynchronously only with its persistent worker; its default strategy
        # needs another package.
        flags += ['--async-save', '--async-strategy', 'mcore', '--use-persistent-ckpt-worker']
    return flags
