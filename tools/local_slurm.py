# SPDX-License-Identifier: Apache-2.0
r"""Runs a real Slurm cluster of five nodes, n1 to n5, on this machine, to try out failures.

    moevement local-slurm start runs/slurm
    export SLURM_CONF=$PWD/runs/slurm/slurm.conf
    sbatch --nodes=3 --gpus-per-node=1 --cpus-per-task=1 scripts/slurm_pretrain.sbatch ...
    moevement local-slurm lose runs/slurm n2
    moevement local-slurm stop runs/slurm

Each node has two CPUs and a fake GPU. The tool needs root, and the packages slurm-wlm and munge of
Debian or Ubuntu; its daemons listen on loopback and on free ports, so another Slurm can run as
well. `lose` kills all processes of a node, as a power failure does; delete its files in /dev/shm
yourself.

Exit status: 0 done, 2 the command is impossible; the message says why.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from .lab.launch import free_port, kill_all
from .lab.programs import LabError, Parser

PACKAGES = ('slurm-wlm', 'munge')
NODES = tuple(f'n{number}' for number in range(1, 6))
_MUNGE, _CONTROLLER, _NODE_DAEMON = _PROGRAMS = 'munged', 'slurmctld', 'slurmd'
_STEP_DAEMON = 'slurmstepd'
_START_S = 60.0
_POLL_S = 0.05
_TAIL = 500
_NODE = '{name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 Gres=gpu:1'
# A fake device: the jobs train on the CPU, but count GPUs as on a real cluster.
_DEVICES = 'Name=gpu File=/dev/null\n'


class LocalSlurm:
    """The cluster in a folder, started by this process or another one.

    Args:
        folder: configuration, logs and state; its path must be short, as it holds a socket.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def configuration(self) -> Path:
        """The configuration file, which all Slurm programs find through their environment."""
        return self.folder / 'slurm.conf'

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, 'SLURM_CONF': str(self.configuration)}

    def start(self) -> None:
        """Start the cluster if `check` allows it, and wait until all nodes are idle."""
        try:
            for name in ('state', 'spool', 'log'):
                (self.folder / name).mkdir(parents=True)
            self._write_files()
        except OSError as error:
            raise LabError(
                f'{self.folder} cannot be made a folder of a cluster: {error}'
            ) from error
        munge = [f'--{name}-file={self.folder}/munge.{name}' for name in ('key', 'pid', 'seed')]
        munge += [f'--log-file={self.folder}/log/munge.log', f'--socket={self.folder}/munge.socket']
        self._start_daemon(_MUNGE, '--force', '--foreground', '--num-threads=2', *munge)
        self._wait((self.folder / 'munge.socket').exists)
        self._start_daemon(_CONTROLLER, '-D', '-i')
        for name in NODES:
            self._start_daemon(_NODE_DAEMON, '-D', '-N', name)
        self._wait(lambda: self.states() == ['idle'] * len(NODES))

    def restart_controller(self) -> None:
        """Kill the controller and start it again with its saved state."""
        _kill([process for process in self.processes() if _program(process) == _CONTROLLER])
        self._start_daemon(_CONTROLLER, '-D')
        self._wait(lambda: len(self.states()) == len(NODES))

    def lose_node(self, name: str) -> int:
        """Kill all processes of a node at once; returns their number.

        These are daemon, steps, agent of the launcher and workers. Their files in `/dev/shm` stay.
        The step daemons die first: one that sees its script die reports a failed job, which a
        lost node cannot.
        """
        processes = self.processes()
        daemon = [one for one in processes if _command(one)[-2:] == ['-N', name]]
        if not daemon:
            raise LabError(f'{name} is not a node of {self.folder}, or it is lost already')
        doomed = [one for one in processes if _variables(one).get('SLURMD_NODENAME') == name]
        _kill([*_step_daemons(doomed), *daemon, *doomed])
        return len(daemon) + len(doomed)

    def states(self) -> list[str]:
        return self.query('sinfo', '--noheader', '--Node', '--format=%T').stdout.split()

    def query(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True)

    def processes(self) -> list[psutil.Process]:
        """Daemons of this cluster and processes of its jobs, but no others with its environment."""
        return [
            process
            for process in psutil.process_iter()
            if (variables := _variables(process)).get('SLURM_CONF') == str(self.configuration)
            and ('SLURM_JOB_ID' in variables or _program(process) in (*_PROGRAMS, _STEP_DAEMON))
        ]

    def stop(self) -> int:
        """End all processes, daemons first, as they might start more.

        Returns the number of processes.
        """
        found = len(self.processes())
        _kill([process for process in self.processes() if _program(process) in _PROGRAMS])
        _kill(self.processes())
        for child in self._children:
            child.wait()
        return found

    def check(self) -> None:
        if os.geteuid() != 0:
            raise LabError('a Slurm cluster on this machine needs root: its daemons start jobs')
        if None in map(shutil.which, _PROGRAMS):
            raise LabError(f'there is no Slurm here: apt-get install {" ".join(PACKAGES)}')
        if self.configuration.exists():
            raise LabError(f'{self.folder} has a cluster already: stop it, and delete the folder')

    def _write_files(self) -> None:
        key = self.folder / 'munge.key'
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        text = Path(__file__).with_suffix('.toml').read_text('utf-8')
        lines = [*tomllib.loads(text.format(port=free_port(), folder=self.folder)).items()]
        host = socket.gethostname()
        lines += [('NodeName', _NODE.format(name=n, host=host, port=free_port())) for n in NODES]
        self.configuration.write_text(''.join(f'{name}={value}\n' for name, value in lines))
        (self.folder / 'gres.conf').write_text(_DEVICES)

    def _start_daemon(self, program: str, *arguments: str) -> None:
        name = '-'.join([program, *arguments[-1:]]) if program == _NODE_DAEMON else program
        with (self.folder / 'log' / f'{name}.log').open('ab') as log:
            self._children.append(
                subprocess.Popen(
                    [program, *arguments],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_S
        while not condition():
            if time.monotonic() > deadline:
                logs = sorted((self.folder / 'log').iterdir())
                tails = (f'--- {log.name}\n{log.read_text()[-_TAIL:]}' for log in logs)
                raise LabError(f'Slurm did not come up within {_START_S:g} s', '\n'.join(tails))
            time.sleep(_POLL_S)


def _variables(process: psutil.Process) -> dict[str, str]:
    """Environment of a process, also of slurmstepd, which overwrites it with its title."""
    try:
        text = Path(f'/proc/{process.pid}/environ').read_text(errors='replace')
    except OSError:
        return {}
    entries = (entry.partition('=') for entry in text.split('\0') if '=' in entry)
    return {name: value for name, _, value in entries}


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.cmdline())
    return []


def _program(process: psutil.Process) -> str:
    """Program of a process; slurmstepd has a title instead, such as `slurmstepd: [7.1]`."""
    name = ''.join(_command(process)[:1]).partition(':')[0]
    return Path(name).name


def _step_daemons(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Parents of processes started by Slurm; their environment does not name a node."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [one for one in process.parents()[:1] if _program(one) == _STEP_DAEMON]
    return found


def _kill(processes: Sequence[psutil.Process]) -> None:
    """Kill processes and wait for their death; zombies count as dead."""
    kill_all(processes)
    while any(map(_lives, processes)):
        time.sleep(_POLL_S)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog='moevement local-slurm', description=__doc__)
    commands = parser.add_subparsers(dest='command', required=True)
    for name, about in (
        ('start', 'start a cluster in a folder'),
        ('lose', 'kill all that runs on a node'),
        ('stop', 'end daemons and jobs'),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument('folder', type=Path, metavar='DIR', help='folder of the cluster')
        if name == 'lose':
            command.add_argument('node', metavar='NODE', choices=NODES, help=', '.join(NODES))
    args = parser.parse_args(argv)
    cluster = LocalSlurm(args.folder)
    try:
        match args.command:
            case 'start':
                cluster.check()
                _start(cluster)
            case 'lose':
                killed = cluster.lose_node(args.node)
                print(f'{args.node} is lost: {killed} processes were killed')
            case 'stop':
                found = cluster.stop()
                print(f'{found} processes ended' if found else f'no cluster runs in {args.folder}')
    except LabError as error:
        print(f'local_slurm: {error}\n{error.tail}'.rstrip(), file=sys.stderr)
        return 2
    return 0


def _start(cluster: LocalSlurm) -> None:
    try:
        cluster.start()
    except LabError:
        cluster.stop()
        raise
    print(f'{len(cluster.states())} nodes are idle; the commands of Slurm find them by')
    print(f'export SLURM_CONF={cluster.configuration}')


if __name__ == '__main__':
    sys.exit(main())
