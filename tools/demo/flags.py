# SPDX-License-Identifier: Apache-2.0
"""The model of the demo: an 8-expert GPT on 2 pipeline stages x 2 expert-parallel ranks."""

from pathlib import Path

STAGE_RANKS = ((0, 1), (2, 3))
"""Ranks by pipeline stage. Two workers per node: each node runs one stage."""

_CPU = (
    '--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion '
    '--no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion '
    '--no-bias-gelu-fusion --no-bias-dropout-fusion'
)
_MODEL = (
    '--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 '
    '--max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu '
    '--disable-bias-linear --untie-embeddings-and-output-weights --num-experts 8 '
    '--moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 1e-2 '
    '--moe-router-load-balancing-type aux_loss --moe-token-dispatcher-type alltoall'
)
_PARALLEL = (
    '--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 '
    '--use-distributed-optimizer --distributed-timeout-minutes 3'
)
_TRAINING = (
    '--bf16 --micro-batch-size 2 --global-batch-size 16 --lr 3e-3 --min-lr 3e-4 '
    '--lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 100 --weight-decay 0.1 '
    '--clip-grad 1.0 --seed 1234 --log-interval 1 --eval-interval 1000000 --eval-iters 0'
)
_DATA = '--tokenizer-type NullTokenizer --vocab-size 257 --split 90,5,5 --num-workers 0'


def training_flags(data: Path, iterations: int, digest: Path) -> list[str]:
    """Flags of the fault-free run.

    Args:
        data: prefix that tools/prepare_data.py wrote.
        iterations: to train.
        digest: file for the digest of the final state.
    """
    return [
        *f'{_CPU} {_MODEL} {_PARALLEL} {_TRAINING} {_DATA}'.split(),
        *('--data-path', str(data), '--data-cache-path', str(data.parent / 'cache')),
        *('--train-iters', str(iterations), '--sparse-ckpt-digest', str(digest)),
    ]


def sparse_flags(memory: Path, run_id: str, events: Path, window: int) -> list[str]:
    """What the protected run has beside them."""
    return [
        *('--sparse-ckpt', '--sparse-ckpt-strict', '--sparse-ckpt-window', str(window)),
        *('--sparse-ckpt-dir', str(memory), '--sparse-ckpt-run-id', run_id),
        *('--sparse-ckpt-events', str(events)),
    ]
