# SPDX-License-Identifier: Apache-2.0
"""Real Slurm: allocations that no batch script requests, and a node on which no agent starts."""

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.slurm import END_STATES, Slurm
from tests.distributed.harness.cluster import ROOT

pytestmark = pytest.mark.timeout(600)
PROGRAM = """
import os

rank, cpus = os.environ['RANK'], os.environ.get('SLURM_CPUS_PER_TASK')
print('rank', rank, 'has GPU', os.environ['CUDA_VISIBLE_DEVICES'], 'and CPUs', cpus, flush=True)
"""

SAVES = """
import os, signal, sys

def save(*_):
    print('saved with', os.environ['RANK'], flush=True)
    sys.exit()

signal.signal(signal.SIGTERM, save)
signal.pause()
"""


# Some sites have --export=NONE by default.
@pytest.mark.parametrize(
    ('asked', 'cpus'),
    [
        (['--gpus-per-node=1', '--export=NONE'], None),
        (['--gpus=2'], None),
        (['--gpus-per-node=1', '--ntasks-per-node=2', '--cpus-per-task=1'], 2),
    ],
)
def test_agents_start_in_any_form_of_allocation(
    asked: list[str], cpus: int | None, slurm: Slurm, tmp_path: Path
) -> None:
    program, log = tmp_path / 'program.py', tmp_path / 'log'
    program.write_text(PROGRAM)
    launch = shlex.join([sys.executable, '-m', 'moevement_ext.launch.slurm', '--', str(program)])
    job = slurm.run(
        *('sbatch', '--parsable', '--nodes=2', '--no-kill', f'--output={log}', f'--chdir={ROOT}'),
        *(*asked, f'--wrap=export PYTHONPATH={ROOT}; exec {launch}'),
    )
    while (state := slurm.state(int(job))) not in END_STATES:
        time.sleep(0.2)
    assert state == 'COMPLETED', log.read_text()
    for rank in range(2):
        assert f'[rank {rank}] rank {rank} has GPU 0 and CPUs {cpus}\n' in log.read_text()


def test_salloc_workers_get_the_exit_signal_before_the_time_limit(
    slurm: Slurm, tmp_path: Path
) -> None:
    program = tmp_path / 'program.py'
    program.write_text(SAVES)
    launch = [
        sys.executable,
        '-m',
        'moevement_ext.launch.slurm',
        '--before-end',
        '30',
        '--',
        str(program),
    ]
    ended = subprocess.run(
        ['salloc', '--nodes=2', '--no-kill', '--time=1', *launch],
        cwd=ROOT,
        env={**slurm.environment, 'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    for rank in range(2):
        assert f'[rank {rank}] saved with {rank}\n' in ended.stdout


LAUNCH = """
import sys

from moevement_ext.launch import slurm

slurm._TO_NOTICE_S = 2.0
sys.exit(slurm.main())
"""
# Every Python reads this at its start: none starts on node n2, although Slurm considers it healthy.
NO_PYTHON = """
import os

if os.environ.get('SLURMD_NODENAME') == 'n2' and 'MOEVEMENT_SUPERVISOR' in os.environ:
    os._exit(1)
"""


def test_requeued_job_excludes_a_node_without_agent(slurm: Slurm, tmp_path: Path) -> None:
    program, launch, log = (tmp_path / name for name in ('program.py', 'launch.py', 'log'))
    program.write_text('')
    launch.write_text(LAUNCH)
    (tmp_path / 'sitecustomize.py').write_text(NO_PYTHON)
    command = shlex.join([sys.executable, str(launch), '--requeue', '--', str(program)])
    job = slurm.run(
        *('sbatch', '--parsable', '--nodes=2', '--gpus-per-node=1', '--no-kill', '--requeue'),
        *('--exclude=n5', '--open-mode=append', f'--output={log}', f'--chdir={ROOT}'),
        f'--wrap=export PYTHONPATH={tmp_path}:{ROOT}; exec {command}',
    )
    while (state := slurm.state(int(job))) not in END_STATES:
        time.sleep(0.2)
    assert state == 'COMPLETED', log.read_text()
    shown = slurm.show(int(job))
    assert shown['Restarts'] == '1', log.read_text()
    assert set(shown['ExcNodeList'].split(',')) == {'n2', 'n5'}
    assert 'n2' not in slurm.hosts(int(job))
    assert 'host n2 is not reached: its step ended with status 1' in log.read_text()
