# SPDX-License-Identifier: Apache-2.0
"""Requests to Slurm, with scripts in place of its commands."""

from pathlib import Path

import pytest

from moevement_ext.launch.link import Address
from moevement_ext.launch.node import slurm_step

pytestmark = pytest.mark.timed

SRUN = """\
#!/usr/bin/env bash
echo "$@ $(env | grep ^SLURM_ | sort | xargs)" >"$0.asked"
"""
ASKED = {
    'one number a node': ('SLURM_GPUS_PER_NODE=8', '', 'SLURM_GPUS_PER_NODE=8'),
    'one a task': ('SLURM_GPUS_PER_TASK=1', '--gpus-per-node=8', ''),
    'one a task, Slurm 24': ('SLURM_TRES_PER_TASK=gres/gpu:1', '--gpus-per-node=8', ''),
    'a number in all': ('SLURM_GPUS=16', '--gpus-per-node=8', ''),
    'one a task, by its binding': ('SLURM_GPU_BIND=single:1', '--gpus-per-node=8', ''),
    'the same, by another name': ('SLURM_TRES_BIND=gres/gpu:single:1', '--gpus-per-node=8', ''),
    'a task each': ('SLURM_NTASKS_PER_GPU=1', '--gpus-per-node=8', ''),
}


def asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    srun = folder / 'srun'
    srun.write_text(SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv('PATH', f'{folder}:/usr/bin:/bin')
    slurm_step('n1', Address('here', 1, b'')).close(60.0)
    return (folder / 'srun.asked').read_text().split()


@pytest.mark.parametrize(('variable', 'flag', 'left'), ASKED.values(), ids=ASKED.keys())
def test_agent_gets_all_gpus_of_its_node(
    variable: str, flag: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of one task would get one GPU, or request those of all nodes on one node."""
    monkeypatch.setenv(*variable.split('='))
    monkeypatch.setenv('SLURM_GPUS_ON_NODE', '8')
    asked = asked_for(tmp_path, monkeypatch)
    assert [word for word in asked if word.startswith('--gpus')] == flag.split()
    assert [word for word in asked if word.startswith('SLURM_')] == [
        'SLURM_GPUS_ON_NODE=8',
        *left.split(),
    ]


@pytest.mark.parametrize(
    ('tasks', 'cpus'), [(None, 12), ('1(x5)', 12), ('8(x5)', 96), ('8(x3),4', 48)]
)
def test_agent_gets_the_cpus_of_all_tasks_of_its_node(
    tasks: str | None, cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('SLURM_CPUS_PER_TASK', '12')
    if tasks is not None:
        monkeypatch.setenv('SLURM_TASKS_PER_NODE', tasks)
    asked = asked_for(tmp_path, monkeypatch)
    assert [word for word in asked if word.startswith('--cpus')] == [f'--cpus-per-task={cpus}']
