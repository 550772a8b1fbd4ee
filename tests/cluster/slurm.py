# SPDX-License-Identifier: Apache-2.0
"""A real Slurm cluster on this machine: one controller, and node daemons that listen on loopback.

Needs root and Debian's packages, which are installed if they are not there. A node can be lost as
by a power failure: everything that runs on it is killed at once.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.distributed.harness.cluster import ROOT, _free_port

PACKAGES = ('slurm-wlm', 'munge')
NODES = tuple(f'n{number}' for number in range(1, 6))
START_S = 60.0
END_STATES = ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT', 'NODE_FAIL')

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
SlurmdTimeout=20
MessageTimeout=5
KillWait=5
MpiDefault=none
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = 'NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 Gres=gpu:1\n'
# A device that is none: the jobs train on the CPU, but count it as they do on a real cluster.
_DEVICES = 'Name=gpu File=/dev/null\n'


def require() -> None:
    """Have Slurm here, or skip the test with the reason."""
    if os.geteuid() != 0:
        pytest.skip('a Slurm cluster for tests takes root')
    if shutil.which('slurmctld') and shutil.which('munged'):
        return
    if not shutil.which('apt-get'):
        pytest.skip(f'no Slurm here, and no apt-get to install {" and ".join(PACKAGES)}')
    quiet = {**os.environ, 'DEBIAN_FRONTEND': 'noninteractive', 'RUNLEVEL': '1'}
    for arguments in (['update'], ['install', '-y', '--no-install-recommends', *PACKAGES]):
        done = subprocess.run(['apt-get', *arguments], env=quiet, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f'apt-get {arguments[0]} failed: {done.stderr[-300:]}')


@dataclass
class Slurm:
    """The running cluster, in a folder of its own."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def configuration(self) -> Path:
        """The file that everything of Slurm finds through its environment."""
        return self.folder / 'slurm.conf'

    def start(self) -> None:
        """Return when all nodes are idle."""
        for name in ('state', 'spool', 'log'):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / 'munge.key'
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        nodes = [_NODE.format(name=n, host=socket.gethostname(), port=_free_port()) for n in NODES]
        text = _CONFIGURATION.format(port=_free_port(), folder=self.folder)
        self.configuration.write_text(text + ''.join(nodes))
        (self.folder / 'gres.conf').write_text(_DEVICES)
        self._daemon(
            'munged', '--force', '--foreground', '--num-threads=2', f'--key-file={key}',
            *(f'--{name}-file={self.folder / name}' for name in ('pid', 'seed', 'log')),
            f'--socket={self.folder / "munge.socket"}',
        )  # fmt: skip
        self._wait(lambda: (self.folder / 'munge.socket').exists())
        self._daemon('slurmctld', '-D', '-i')
        for name in NODES:
            self.start_node(name)
        self._wait(lambda: self.states() == ['idle'] * len(NODES))

    def restart_controller(self) -> None:
        """It dies, and goes on with what it has written down."""
        self.daemons['slurmctld'].kill()
        self.daemons['slurmctld'].wait()
        self._daemon('slurmctld', '-D')
        self._wait(lambda: len(self.states()) == len(NODES))

    def start_node(self, name: str) -> None:
        """Start the daemon of a node, also of one that was lost."""
        self._daemon('slurmd', '-D', '-N', name)

    def lose_node(self, name: str) -> None:
        """Kill all that runs on a node, at once: daemon, steps, launcher's agent and workers."""
        doomed = [process for process in self._processes() if self._is_on(process, name)]
        doomed += [
            parent
            for process in doomed
            if (parent := process.parent()) is not None and 'slurmstepd' in parent.name()
        ]
        self.daemons[f'slurmd {name}'].kill()
        for process in doomed:
            _kill(process)
        psutil.wait_procs(doomed)

    def submit(self, script: str, *flags: str, log: Path, sbatch: tuple[str, ...] = ()) -> int:
        """Submit a script of the project; returns the job's number."""
        command = ['sbatch', '--parsable', '--gpus-per-node=1', '--cpus-per-task=1']
        command += ['--time=30', f'--output={log}', *sbatch, f'scripts/{script}', *flags]
        return int(self.run(*command))

    def state(self, job: int) -> str:
        """State of a job, in Slurm's words."""
        return self.show(job)['JobState']

    def show(self, job: int) -> dict[str, str]:
        """What the controller knows of a job."""
        words = self.run('scontrol', 'show', 'job', str(job), '--oneliner').split()
        return dict(word.partition('=')[::2] for word in words)

    def states(self) -> list[str]:
        """State of each node that answers."""
        done = self._run('sinfo', '--noheader', '--Node', '--format=%T')
        return done.stdout.split()

    def run(self, *command: str) -> str:
        """Output of a command of Slurm."""
        done = self._run(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def left(self) -> list[str]:
        """Command lines of what jobs have left behind."""
        return [
            ' '.join(process.cmdline())
            for process in self._processes()
            if 'SLURM_JOB_ID' in _environment(process)
        ]

    def stop(self) -> None:
        """End everything, by process id; daemons first, which might start more."""
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()
        for process in self._processes():
            _kill(process)

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, 'SLURM_CONF': str(self.configuration)}
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)

    def _daemon(self, program: str, *arguments: str) -> None:
        name = ' '.join([program, *arguments[-1:]]) if program == 'slurmd' else program
        with (self.folder / 'log' / f'{name}.log').open('ab') as log:
            self.daemons[name] = subprocess.Popen(
                [program, *arguments],
                env={**os.environ, 'SLURM_CONF': str(self.configuration)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _processes(self) -> list[psutil.Process]:
        """Of jobs and daemons of this cluster."""
        return [
            process
            for process in psutil.process_iter()
            if _environment(process).get('SLURM_CONF') == str(self.configuration)
        ]

    @staticmethod
    def _is_on(process: psutil.Process, node: str) -> bool:
        return _environment(process).get('SLURMD_NODENAME') == node

    def _wait(self, condition) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + START_S
        while not condition():
            logs = (path.read_text()[-500:] for path in (self.folder / 'log').iterdir())
            assert time.monotonic() < deadline, '\n'.join(logs)
            time.sleep(0.05)


def _environment(process: psutil.Process) -> dict[str, str]:
    """As psutil has it, but also of slurmstepd, which writes its title into it."""
    try:
        text = Path(f'/proc/{process.pid}/environ').read_text(errors='replace')
    except OSError:
        return {}
    return dict(entry.partition('=')[::2] for entry in text.split('\0') if '=' in entry)


def _kill(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        pass


@contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    """A cluster, of which nothing is left afterwards."""
    require()
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
