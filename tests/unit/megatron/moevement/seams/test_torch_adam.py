# SPDX-License-Identifier: Apache-2.0
"""A dense restart with torch's Adam has one step counter per parameter, on any device."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[5]
RESTART = """
from types import SimpleNamespace
import torch
from megatron.moevement.seams import cpu_device
cpu_device.hide_transformer_engine()
asked, torch.cuda.is_available = torch.cuda.is_available, lambda: {gpu}
from megatron.moevement import pretrain_gpt
torch.cuda.is_available = asked  # the optimizer below is on the CPU
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.moevement.program import run_with_sparse_checkpointing

def optimizer():
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2)) for _ in range(3)])
    config, ddp = SimpleNamespace(fp16=False), SimpleNamespace(use_megatron_fsdp=False)
    return SimpleNamespace(optimizer=inner, config=config, ddp_config=ddp, grad_scaler=None)

def update(inner):
    for parameter in inner.param_groups[0]['params']:
        parameter.grad = torch.ones(2)
    inner.step()

def train(**_):
    upstreams = optimizer()
    update(upstreams.optimizer)
    groups = upstreams.optimizer.state_dict()['param_groups']
    saved = [{{**group, 'step': 7.0}} for group in groups]
    DistributedOptimizer.load_state_dict(upstreams, {{'optimizer': {{'param_groups': saved}}}})
    update(upstreams.optimizer)
    print([float(state['step']) for state in upstreams.optimizer.state.values()])

args = SimpleNamespace(sparse_ckpt=False, sparse_ckpt_digest=None, rank=0)
run_with_sparse_checkpointing(train, args)
"""


@pytest.mark.parametrize('gpu', [pytest.param(False, marks=pytest.mark.thorough), True])
def test_step_counters_are_separate_after_a_dense_restart(gpu: bool) -> None:
    code = RESTART.format(gpu=gpu)
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith('[8.0, 8.0, 8.0]\n')
