# SPDX-License-Identifier: Apache-2.0
"""Windows of an ended run are exported as a checkpoint that upstream's own loader reads."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from moevement_ext.events import RecoveryStarted, WindowOnDisk
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import ROOT, Cluster
from tools.windows.__main__ import main

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1200)]

MODEL = '--bf16 --use-distributed-optimizer --untie-embeddings-and-output-weights --train-iters 14'
ONE_STAGE = MODEL.split()
TWO_STAGES = [*ONE_STAGE, '--pipeline-model-parallel-size', '2']
WINDOW = ['--sparse-ckpt-window', '3']


def export(job: Cluster, directory: Path, dense: Path) -> None:
    launcher = ['-m', 'moevement_ext.launch.command_line']
    command = [sys.executable, *launcher, '--nodes', '2', '--']
    command += [str(ROOT / 'pretrain_gpt.py'), *job.flags]
    windows = ['export', str(directory), '--to', 'torch_dist', '--output', str(dense)]
    assert main([*windows, '--', *command]) == 0


def loss_after(iteration: int, output: str) -> float:
    (found,) = re.findall(rf'iteration +{iteration}/.*?lm loss: (\S+)', output)
    return float(found)


@pytest.mark.parametrize('tier', ['memory', 'disk'])
def test_any_layout_resumes_from_an_export(
    tier: str,
    cluster: Make,
    reference: Reference,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    dense, disk = tmp_path / 'dense', tmp_path / 'disk'
    disk.mkdir()
    to_disk = ['--sparse-ckpt-disk', str(disk), '--sparse-ckpt-disk-every', '1']
    extra = to_disk if tier == 'disk' else []
    job = cluster(*TWO_STAGES, *WINDOW, *extra, ranks=2)
    assert -9 in job.run(fail_at='1:11:forward')
    if tier == 'disk':
        assert job.events_of(WindowOnDisk)
        shutil.rmtree(job.memory)
    export(job, disk if tier == 'disk' else job.memory, dense)
    (begun,) = job.events_of(RecoveryStarted)
    assert begun.source == ('disk' if tier == 'disk' else 'own memory')
    first = begun.dense_at + 1
    assert f'iteration {first} is in {dense}' in capfd.readouterr().out
    assert job.memory.exists() == (tier == 'memory')  # what was read stays
    assert any(disk.iterdir()) == (tier == 'disk')

    same = cluster(*TWO_STAGES, '--load', str(dense), sparse=False, ranks=2)
    same.finish(timeout_s=400.0)
    other = cluster(*ONE_STAGE, '--load', str(dense), sparse=False, ranks=1)
    other.finish(timeout_s=400.0)
    for one in (same, other):
        assert f'iteration        {first}/' not in one.output(0)
    assert differences(reference(*TWO_STAGES, ranks=2), read_digest(same)) == []
    losses = [loss_after(14, one.output(0)) for one in (same, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
