# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of a job under any launcher, and the processes that it starts."""

import contextlib
import enum
import os
import random
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from megatron.moevement.seams.without_gpu import COMPILED
from moevement_ext import command
from moevement_ext.launch.child import bound
from moevement_ext.launch.environment import connections

ROOT, PROGRAM = command.ROOT, command.PROGRAM
PACKAGE = __name__.rpartition('.lab.')[0]
"""Package of all tools; its name in a wheel is another."""
_PORTS = 20_000, 32_000
_GRACE_S = 15  # between SIGTERM and SIGKILL

ENVIRONMENT = {
    # One thread per process keeps the order of summation, hence the bits, equal everywhere.
    'OMP_NUM_THREADS': '1',
    'GLOO_SOCKET_IFNAME': 'lo',
    'PYTHONUNBUFFERED': '1',
    'PYTHONWARNINGS': 'ignore',
}
# For equal conditions on machines with and without a GPU.
_NO_GPU = {'CUDA_VISIBLE_DEVICES': ''}
# Flags of the program; the last value of a flag counts.
_ON_GPU = '--distributed-backend nccl --disable-gloo-process-groups --deterministic-mode'.split()


class Launcher(enum.StrEnum):
    """The program that starts and restarts the workers."""

    LOCAL = 'local'
    """`moevement launch`, one process for all emulated nodes."""
    TORCHRUN = 'torchrun'
    """One agent for each emulated node, static rendezvous."""


class Launch(NamedTuple):
    """A job of `pretrain_gpt.py` on emulated nodes."""

    folder: Path
    """Folder of the logs, which the job creates; must not exist."""
    flags: Sequence[str]
    nodes: int
    workers_per_node: int
    max_restarts: int = 0
    """Limit of replaced workers: over the job, or under torchrun per node."""
    spares: int = 0
    """Processes that have imported the program, and fork workers; torchrun has none."""
    variables: Mapping[str, str] = {}
    """Environment variables of the workers, in addition to `ENVIRONMENT`."""
    settings: str = ''
    """Contents of a file of settings, as of a site."""
    share_gpu: bool = False
    """All ranks use the first GPU, over NCCL, instead of the CPU, over gloo."""
    guests: bool = False
    """Nodes may be lost for good; their ranks go on at others. Under `Launcher.LOCAL`."""
    checkout: Path = ROOT
    """Checkout of the program; one other than this tool's requires torchrun."""
    program_file: str = PROGRAM

    @property
    def world_size(self) -> int:
        return self.nodes * self.workers_per_node

    def ranks_of(self, node: int) -> range:
        return range(node * self.workers_per_node, (node + 1) * self.workers_per_node)

    @property
    def logs(self) -> Path:
        return self.folder / 'logs'

    def environment(self) -> dict[str, str]:
        """Whole environment of the workers; faults armed in this process are left out."""
        inherited = {name: os.environ[name] for name in os.environ if name != 'MOEVEMENT_FAIL_AT'}
        inherited = {**connections(self.flags), **inherited}
        device = {} if self.share_gpu else _NO_GPU
        modules = os.pathsep.join(filter(None, [str(self.checkout), inherited.get('PYTHONPATH')]))
        return {**inherited, **ENVIRONMENT, 'PYTHONPATH': modules, **device, **self.variables}

    def program(self) -> list[str]:
        program = str(self.checkout / self.program_file)
        if not self.share_gpu:
            return [program, *self.flags]
        # On a GPU, jobs run with the flags of users' jobs.
        return [program, *(flag for flag in self.flags if flag not in COMPILED), *_ON_GPU]


class Death(NamedTuple):
    """The end of a worker."""

    rank: int
    pid: int
    code: int | None
    """Exit status; None: killed by a signal."""
    time: float
    """Time of the launcher's report, in seconds since the epoch."""

    def __str__(self) -> str:
        how = 'was killed' if self.code is None else f'ended with exit status {self.code}'
        return f'rank {self.rank} (pid {self.pid}) {how}'


class Launched:
    """The launchers of a job, by node, and all processes below them. Used from one thread."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._hosts = {node: node_name(node) for node in range(launch.nodes)}

    def _start(
        self, node: int, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        with log.open('ab') as output:
            self._launchers[node] = subprocess.Popen(
                bound(command),
                cwd=self._launch.checkout,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this tool, which then ends the job
            )

    def hosts(self) -> dict[int, str]:
        """Name of the emulated node where the ranks of each node are."""
        return self._hosts

    def pids_of_launchers(self) -> list[int]:
        return [launcher.pid for launcher in self._launchers.values()]

    def exit_status(self) -> int | None:
        """Exit status of a failed launcher, else 0; None while the job runs."""
        codes = [launcher.poll() for launcher in self._launchers.values()]
        return next((code for code in codes if code), None if None in codes else 0)

    def kill(self, node: int | None = None) -> None:
        """SIGKILL the launcher of a node, or all, and their workers."""
        for launcher in self._launchers.values() if node is None else [self._launchers[node]]:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGSTOP)  # it starts no more workers
                kill_all(family([psutil.Process(launcher.pid)]))
            launcher.wait()

    def end(self) -> None:
        """SIGTERM to the launchers, SIGKILL to all processes that are left some seconds later."""
        running = [one for one in self._launchers.values() if one.poll() is None]
        everybody = family([psutil.Process(launcher.pid) for launcher in running])
        for launcher in running:
            launcher.terminate()
        kill_all(family(psutil.wait_procs(everybody, timeout=_GRACE_S)[1]))
        for launcher in self._launchers.values():
            launcher.wait()


def as_flags(**values: object) -> list[str]:
    """`--name value` of each value, with hyphens; True: only the name; False or None: neither."""
    words: list[str] = []
    for name, value in values.items():
        if value is not None and value is not False:
            own = [] if value is True else [str(value)]
            words += [f'--{name.replace("_", "-")}', *own]
    return words


def node_name(node: int) -> str:
    """Name of an emulated node, as used for the folder of its host memory."""
    return f'node{node}'


def family(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """The processes that still run, with all their descendants."""
    found = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.children(recursive=True)
    return found


def kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def free_port() -> int:
    """A TCP port of the loopback interface without a listener.

    Outside the range of outgoing connections: an agent starts to listen on it seconds later.
    """
    while True:
        port = random.randrange(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(('127.0.0.1', port))
            return port
