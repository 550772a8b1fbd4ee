# SPDX-License-Identifier: Apache-2.0
"""What the tool refuses; clusters that it starts are those of tests/cluster."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tools import local_slurm
from tools.local_slurm import main

pytestmark = pytest.mark.timed


@pytest.mark.parametrize(
    ('user', 'programs', 'there', 'message'),
    [
        (1000, True, False, 'needs root'),
        (0, False, False, 'apt-get install slurm-wlm munge'),
        (0, True, True, 'has a cluster already'),
    ],
)
def test_start_names_missing_programs(
    user: int,
    programs: bool,
    there: bool,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(local_slurm.os, 'geteuid', lambda: user)
    monkeypatch.setattr(local_slurm.shutil, 'which', lambda name: name if programs else None)
    if there:
        (tmp_path / 'slurm.conf').touch()
    assert main(['start', str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_step_daemons_of_a_lost_node_die_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step daemon that outlives its script would report the job as failed."""
    script = "bash -c 'echo started; kill -STOP $$'"  # its environment is there once it says so
    step = f'SLURMD_NODENAME=n2 SLURM_JOB_ID=1 {script} & wait'
    commands = (
        ['slurmd', '-c', 'echo started; read', '-N', 'n2'],
        ['slurmstepd: [1.batch]', '-c', step],
    )
    variables = {**os.environ, 'SLURM_CONF': str(tmp_path.resolve() / 'slurm.conf')}
    killed = []
    monkeypatch.setattr(local_slurm, '_kill', killed.extend)
    with contextlib.ExitStack() as stack:
        for command in commands:
            started = subprocess.Popen(
                command,
                executable='/bin/bash',
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            stack.enter_context(started)
            stack.callback(os.killpg, started.pid, signal.SIGKILL)
            assert started.stdout is not None
            assert started.stdout.readline() == b'started\n'
        assert main(['lose', str(tmp_path), 'n2']) == 0
        assert [process.cmdline()[0] for process in killed] == [
            'slurmstepd: [1.batch]',
            'slurmd',
            'bash',
        ]
