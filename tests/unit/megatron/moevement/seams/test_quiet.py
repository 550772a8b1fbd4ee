# SPDX-License-Identifier: Apache-2.0
"""What is left out of the log, what is not, and how all of it is to be seen."""

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
Said = dict[str, list[str]]
WITHOUT, OVER = 'from here on without protection', 'that was all'


def start_all() -> None:
    """Each in a fork of this process, which has torch, but not yet upstream."""
    for environment in STARTS.values():
        if not (pid := os.fork()):
            os.environ.update(environment, RANK='0')
            start()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        print(OVER, flush=True)


def start() -> None:
    """What upstream says until it trains; first with protection, and then without."""
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


@pytest.fixture(scope='module')
def said() -> Said:
    """By each start: in all with protection, and with the arguments without."""
    program = f'from {__name__} import start_all; start_all()'
    result = subprocess.run(
        [sys.executable, '-c', program], cwd=ROOT, text=True, check=True,
        env={**os.environ, **WITHOUT_GPU}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    found = result.stdout.split(OVER)
    return {name: found[number].split(WITHOUT) for number, name in enumerate(STARTS)}


def test_the_first_process_says_once_what_is_missing_and_all_it_was_started_with(
    said: Said,
) -> None:
    found = said['first'][0]
    assert found.count('Apex are not installed') == 1
    assert 'CPU RNG state changed' not in found and 'of another kind' in found
    assert '  lr ...' in found


def test_a_worker_that_is_started_again_says_neither(said: Said) -> None:
    found = said['again'][0]
    assert 'not installed' not in found and 'lr ...' not in found
    assert 'arguments: as at the first start, where they were printed' in found


def test_without_protection_upstream_prints_its_arguments_at_every_start(said: Said) -> None:
    assert '  lr ...' in said['again'][1]


def test_all_of_it_can_be_seen(said: Said) -> None:
    found = said['all of it'][0]
    assert found.count('not installed') > 2 and 'CPU RNG state changed' in found
    assert '  lr ...' in found


@pytest.mark.parametrize(
    'flags',
    ['', '--lr 1', '--distributed-backend nccl', '--distributed-backend=nccl']
    + ['--distributed-backend gloo --distributed-backend nccl'],
)
def test_a_gpu_that_is_not_there_is_said_in_a_line_with_what_helps(flags: str) -> None:
    with pytest.raises(UserError, match='no GPU is visible.* add --distributed-backend gloo --tr'):
        quiet.refuse_without_gpu(flags.split())


@pytest.mark.parametrize(
    'flags',
    ['--distributed-backend gloo', '--distributed-backend=gloo', '--distributed-b gloo', '--help']
    + ['-h', '--yaml-cfg x.yaml', '--distributed-backend nccl --distributed-backend gloo'],
)
def test_what_a_cpu_can_do_is_not_refused(flags: str) -> None:
    quiet.refuse_without_gpu(flags.split())


def test_the_trainer_ends_at_once_and_in_one_line() -> None:
    result = subprocess.run(
        [sys.executable, 'pretrain_gpt.py', '--num-layers', '4', '--sparse-ckpt'], cwd=ROOT,
        env={**os.environ, **WITHOUT_GPU}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == EXIT_USER_ERROR and result.stdout == ''
    (line,) = result.stderr.splitlines()
    assert line.startswith('pretrain_gpt.py: error: no GPU is visible here')


def test_the_flags_of_a_cpu_are_those_of_the_tutorial() -> None:
    tutorial = ' '.join((ROOT / 'docs/tutorial.md').read_text().split())
    assert all(flag in tutorial for flag in without_gpu.FLAGS.split())
