# SPDX-License-Identifier: Apache-2.0
"""Small models for the CPU, flags to protect them, and text to train them."""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from megatron.moevement.seams import without_gpu

from .launch import PACKAGE, ROOT, as_flags
from .programs import LabError

TEXT = '--tokenizer-type NullTokenizer --vocab-size 257 --split 90,5,5'.split()
"""Flags for text as bytes, as `prepare_data` writes it."""
_NO_EVALUATION = '--num-workers 0 --eval-interval 1000000 --eval-iters 0'.split()
# Asynchronous saves of upstream need its persistent worker here; its default strategy needs another
# package.
_ASYNC = '--async-save --async-strategy mcore --use-persistent-ckpt-worker'.split()

_PROCESSORS = Path('/proc/cpuinfo')
TRAINING = (
    '--lr-decay-style cosine --weight-decay 0.1 --seed 1234 --log-interval 1 '
    '--distributed-timeout-minutes 3'
).split()
_KIND = (
    '--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear '
    '--moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 '
    '--moe-router-load-balancing-type aux_loss'
).split()


class ToyModel(NamedTuple):
    """A GPT with a Mixture of Experts in every layer; experts are as wide as the model."""

    hidden: int
    heads: int
    sequence: int
    experts: int

    def flags(self) -> list[str]:
        sizes = as_flags(
            hidden_size=self.hidden,
            moe_ffn_hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_experts=self.experts,
            seq_length=self.sequence,
            max_position_embeddings=self.sequence,
        )
        return [*without_gpu.FLAGS.split(), *_KIND, *sizes]

    def training_flags(self, own: Iterable[str], data: Path, iterations: int) -> list[str]:
        """Flags of plain Megatron: `own` flags, and the common flags of small jobs."""
        common = [*self.flags(), *TRAINING, *own, *TEXT, *_NO_EVALUATION, *data_flags(data)]
        return [*common, '--train-iters', str(iterations)]


def native_precision(gpu: bool = False) -> str:
    """`bf16`; `fp32` on a CPU that would emulate bf16, at three to fifteen times the time."""
    known = {'avx512bw', 'amx_bf16', 'avx_ne_convert', 'bf16'}
    for line in _PROCESSORS.read_text('utf-8').splitlines():
        if line.startswith(('flags', 'Features')):
            return 'bf16' if gpu or known.intersection(line.split()) else 'fp32'
    return 'bf16'


def data_flags(data: Path) -> list[str]:
    return as_flags(data_path=data, data_cache_path=data.parent / 'cache')


def sparse_flags(
    memory: Path, run_id: str, window: int | str, events: Path | None = None
) -> list[str]:
    return as_flags(
        sparse_ckpt=True,
        sparse_ckpt_strict=True,
        sparse_ckpt_window=window,
        sparse_ckpt_dir=memory,
        sparse_ckpt_run_id=run_id,
        sparse_ckpt_events=events,
    )


def dense_flags(checkpoints: Path, interval: int, asynchronous: bool) -> list[str]:
    """Flags to save Megatron's dense checkpoints, and to resume from the newest if present."""
    where = as_flags(save=checkpoints, load=checkpoints, save_interval=interval)
    return [*where, '--ckpt-format', 'torch_dist', *(_ASYNC if asynchronous else ())]


def prepare(args: argparse.Namespace, name: str) -> tuple[Path, Path]:
    """Return an empty folder below `--output`, and the prefix of the text to train on."""
    output: Path = args.output.resolve()
    shutil.rmtree(output / name, ignore_errors=True)
    (output / name).mkdir(parents=True)
    return output / name, prepare_text(output / 'data')


def prepare_text(folder: Path, megabytes: int = 4, quiet: bool = True) -> Path:
    """Write text of the standard library as byte tokens, once; returns its prefix."""
    prefix = folder / 'stdlib'
    if not prefix.with_suffix('.idx').exists():
        command = [sys.executable, '-m', f'{PACKAGE}.prepare_data']
        command += ['--output-prefix', str(prefix), '--limit-mb', str(megabytes)]
        environment = os.environ | {'PYTHONWARNINGS': 'ignore'}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=quiet, text=True)
        if done.returncode:
            raise LabError('the text could not be prepared', done.stderr or '')
    return prefix
