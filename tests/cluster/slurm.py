# SPDX-License-Identifier: Apache-2.0
"""The cluster of `tools.local_slurm` as the tests use it.

Needs root and Debian's packages, which are installed if they are missing.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.distributed.harness.cluster import ROOT
from tools.local_slurm import NODES, PACKAGES, LocalSlurm, _variables

__all__ = ['END_STATES', 'INSTALLATION', 'NODES', 'Slurm', 'require', 'running']

END_STATES = ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT', 'NODE_FAIL')
INSTALLATION = (
    ('apt-get', 'update'),
    ('apt-get', 'install', '-y', '--no-install-recommends', *PACKAGES),
)


def require() -> None:
    """Install Slurm if it is missing; skip the test with the reason if that fails."""
    if os.geteuid() != 0:
        pytest.skip('a Slurm cluster for tests takes root')
    if shutil.which('slurmctld') and shutil.which('munged'):
        return
    if not shutil.which('apt-get'):
        pytest.skip(f'no Slurm here, and no apt-get to install {" and ".join(PACKAGES)}')
    quiet = {**os.environ, 'DEBIAN_FRONTEND': 'noninteractive', 'RUNLEVEL': '1'}
    for command in INSTALLATION:
        done = subprocess.run(command, env=quiet, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f'{" ".join(command[:2])} failed: {done.stderr[-300:]}')


class Slurm(LocalSlurm):
    """The running cluster, in its own folder."""

    def query(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command in the checkout, as a user submits."""
        return subprocess.run(
            command, env=self.environment, cwd=ROOT, capture_output=True, text=True
        )

    def submit(self, script: str, *flags: str, log: Path, sbatch: Sequence[str] = ()) -> int:
        """Submit a script of the project; return the job id."""
        command = ['sbatch', '--parsable', '--gpus-per-node=1', '--cpus-per-task=1']
        command += ['--time=30', f'--output={log}', *sbatch, f'scripts/{script}', *flags]
        return int(self.run(*command))

    def state(self, job: int) -> str:
        """Slurm's name for the state of a job."""
        return self.show(job)['JobState']

    def show(self, job: int) -> dict[str, str]:
        """Fields of `scontrol show job`."""
        words = self.run('scontrol', 'show', 'job', str(job), '--oneliner').split()
        return dict(word.partition('=')[::2] for word in words)

    def hosts(self, job: int) -> list[str]:
        return self.run('scontrol', 'show', 'hostnames', self.show(job)['NodeList']).split()

    def run(self, *command: str) -> str:
        """Run a Slurm command; return its output."""
        done = self.query(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def left(self) -> list[str]:
        """Command lines of processes that jobs left behind."""
        return [
            ' '.join(process.cmdline())
            for process in self.processes()
            if 'SLURM_JOB_ID' in _variables(process)
        ]


@contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    """A running cluster; stopped at exit."""
    require()
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
