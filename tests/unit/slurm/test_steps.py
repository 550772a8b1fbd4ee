# SPDX-License-Identifier: Apache-2.0
"""What Slurm is asked for, with a program in the place of its own."""

from pathlib import Path

import pytest

from moevement_ext.slurm.address import Address
from moevement_ext.slurm.steps import slurm_step

SRUN = """\
#!/usr/bin/env bash
echo "$@ $(env | grep ^SLURM_ | sort | xargs)" >"$0.asked"
"""
ASKED = {
    'one number a node': ('SLURM_GPUS_PER_NODE=8', '', 'SLURM_GPUS_PER_NODE=8'),
    'one a task': ('SLURM_GPUS_PER_TASK=1', '--gpus-per-node=8', ''),
    'one a task, Slurm 24': ('SLURM_TRES_PER_TASK=gres/gpu:1', '--gpus-per-node=8', ''),
    'a number in all': ('SLURM_GPUS=16', '--gpus-per-node=8', ''),
    'a task each': ('SLURM_NTASKS_PER_GPU=1', '--gpus-per-node=8', ''),
}


@pytest.mark.parametrize(('variable', 'flag', 'left'), ASKED.values(), ids=ASKED.keys())
def test_an_agent_has_all_gpus_of_its_node(
    variable: str, flag: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task of a step had one of them, or as many as all nodes: more than there are."""
    srun = tmp_path / 'srun'
    srun.write_text(SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    monkeypatch.setenv(*variable.split('='))
    monkeypatch.setenv('SLURM_GPUS_ON_NODE', '8')
    slurm_step('n1', Address('here', 1, b'')).close(60.0)
    asked = (tmp_path / 'srun.asked').read_text().split()
    assert [word for word in asked if word.startswith('--gpus')] == flag.split()
    assert [word for word in asked if word.startswith('SLURM_')] == [
        'SLURM_GPUS_ON_NODE=8',
        *left.split(),
    ]
