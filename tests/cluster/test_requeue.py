# SPDX-License-Identifier: Apache-2.0
"""On real Slurm, a requeued job excludes a node on which no agent starts."""

import shlex
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.slurm import END_STATES, Slurm
from tests.distributed.harness.cluster import ROOT

pytestmark = pytest.mark.timeout(600)
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
