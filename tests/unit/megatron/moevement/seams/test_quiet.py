# SPDX-License-Identifier: Apache-2.0
"""Lines left out of the log, lines kept, and the switch that shows all."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.moevement.seams import cpu_device, quiet, without_gpu
from moevement_ext.errors import EXIT_USER_ERROR, UserError

ROOT = Path(__file__).resolve().parents[5]
WITHOUT_GPU = {'CUDA_VISIBLE_DEVICES': '', 'TORCHDYNAMO_DISABLE': '1', 'OMP_NUM_THREADS': '1'}
STARTS = {
    'first': {'TORCHELASTIC_RESTART_COUNT': '0'},
    'again': {'TORCHELASTIC_RESTART_COUNT': '1'},
    'all of it': {'TORCHELASTIC_RESTART_COUNT': '1', 'MOEVEMENT_UPSTREAM_LOG': 'all'},
}
WITHOUT, OVER = 'from here on without protection', 'that was all'


def start_all() -> None:
    """Each start in a fork of this process, which has imported torch but not upstream."""
    for environment in STARTS.values():
        if not (pid := os.fork()):
            os.environ.update(environment, RANK='0')
            start()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        print(OVER, flush=True)


def start() -> None:
    """Upstream's output until training; first with protection, then without."""
    cpu_device.install()
    from megatron.core.tensor_parallel import random
    from megatron.training import arguments

    tracker = random.CudaRNGStatesTracker()
    tracker.add('model', 1)
    cpu_device.patch_upstream()
    with tracker.fork('model'):
        torch.rand(3)
    logging.getLogger('megatron.core.tensor_parallel.random').warning('of another kind')
    quiet.arguments_once()
    for sparse in (True, False):
        arguments._print_args('arguments', SimpleNamespace(rank=0, sparse_ckpt=sparse, lr=0.25))
        print(WITHOUT, flush=True)


def test_repeated_lines_are_left_out_unless_asked_for() -> None:
    """Of a first start, of a worker that starts again, and of one with the variable."""
    result = subprocess.run(
        [sys.executable, '-c', f'from {__name__} import start_all; start_all()'],
        cwd=ROOT,
        text=True,
        check=True,
        env={**os.environ, **WITHOUT_GPU},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    first, again, everything = (one.split(WITHOUT) for one in result.stdout.split(OVER)[:3])
    assert first[0].count('Apex are not installed') == 1 and '  lr ...' in first[0]
    assert 'CPU RNG state changed' not in first[0] and 'of another kind' in first[0]
    assert 'not installed' not in again[0] and 'lr ...' not in again[0]
    assert 'arguments: as at the first start, where they were printed' in again[0]
    assert '  lr ...' in again[1], 'without protection nothing is left out'
    assert everything[0].count('not installed') > 2 and '  lr ...' in everything[0]
    assert 'CPU RNG state changed' in everything[0]


@pytest.mark.parametrize(
    'flags',
    ['', '--lr 1', '--distributed-backend nccl', '--distributed-backend=nccl']
    + ['--distributed-backend gloo --distributed-backend nccl'],
)
def test_missing_gpu_is_refused_with_the_remedy(flags: str) -> None:
    with pytest.raises(UserError, match='no GPU is visible.* add --distributed-backend gloo --tr'):
        quiet.refuse_without_gpu(flags.split())


@pytest.mark.parametrize(
    'flags',
    ['--distributed-backend gloo', '--distributed-backend=gloo', '--distributed-b gloo', '--help']
    + ['-h', '--yaml-cfg x.yaml', '--distributed-backend nccl --distributed-backend gloo'],
)
def test_cpu_flags_are_accepted_without_a_gpu(flags: str) -> None:
    quiet.refuse_without_gpu(flags.split())


def test_trainer_without_a_gpu_ends_with_one_line() -> None:
    result = subprocess.run(
        [sys.executable, 'pretrain_gpt.py', '--num-layers', '4', '--sparse-ckpt'],
        cwd=ROOT,
        env={**os.environ, **WITHOUT_GPU},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == EXIT_USER_ERROR and result.stdout == ''
    (line,) = result.stderr.splitlines()
    assert line.startswith('pretrain_gpt.py: error: no GPU is visible here')


def test_tutorial_lists_the_cpu_flags() -> None:
    tutorial = ' '.join((ROOT / 'docs/tutorial.md').read_text().split())
    assert all(flag in tutorial for flag in without_gpu.FLAGS.split())
