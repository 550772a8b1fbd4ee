# SPDX-License-Identifier: Apache-2.0
"""A job as it is launched, whatever launches it, and the processes that it consists of."""

import argparse
import contextlib
import enum
import os
import random
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from moevement_ext.launch.connections import connections

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = 'pretrain_gpt.py'
_PORTS = 20_000, 32_000
GRACE_S = 15
"""Between a polite end and SIGKILL."""

ENVIRONMENT = {
    # One thread a process keeps the order of summation, hence the bits, the same everywhere.
    'OMP_NUM_THREADS': '1',
    'GLOO_SOCKET_IFNAME': 'lo',
    'PYTHONUNBUFFERED': '1',
    'PYTHONWARNINGS': 'ignore',
}
_NO_GPU = {'CUDA_VISIBLE_DEVICES': ''}
"""The same on a machine with and without a GPU."""
_ON_GPU = '--distributed-backend nccl --disable-gloo-process-groups --deterministic-mode'.split()
"""Flags of the program; the last of a flag counts."""
_FUSIONS = {'--no-bias-swiglu-fusion', '--no-bias-gelu-fusion', '--no-bias-dropout-fusion'}
"""Switches of what upstream compiles; left out on a GPU, where jobs run as a user runs them."""


class Launcher(enum.StrEnum):
    """What starts the workers, and starts them again."""

    LOCAL = 'local'
    """`scripts/local_cluster.py`, one for all emulated nodes."""
    TORCHRUN = 'torchrun'
    """One agent for each emulated node, static rendezvous."""


class Launch(NamedTuple):
    """A job of `pretrain_gpt.py` on emulated nodes."""

    folder: Path
    """For the logs; the job makes it, and it must not exist."""
    flags: Sequence[str]
    """Flags of the program."""
    nodes: int
    workers_per_node: int
    max_restarts: int = 0
    """Deaths of workers that are made up for: of all, or under torchrun of each node."""
    spares: int = 0
    """Hot spares; torchrun has none."""
    fork: bool = False
    """All workers are forked from one process that has imported the program; not under torchrun."""
    variables: Mapping[str, str] = {}
    """Environment of the workers besides `ENVIRONMENT`."""
    share_gpu: bool = False
    """All ranks on the first GPU, over NCCL, rather than on the CPU, over gloo."""
    checkout: Path = ROOT
    """Whose program runs; another than this tool's own only under torchrun."""
    program_file: str = PROGRAM
    """Path of the program in the checkout."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.workers_per_node

    def environment(self) -> dict[str, str]:
        """All of it; a fault that is armed in this process is none of the job."""
        inherited = {name: os.environ[name] for name in os.environ if name != 'MOEVEMENT_FAIL_AT'}
        inherited = {**connections(self.flags), **inherited}
        device = {} if self.share_gpu else _NO_GPU
        modules = os.pathsep.join(filter(None, [str(self.checkout), inherited.get('PYTHONPATH')]))
        checkout = {'PYTHONPATH': modules}
        return {**inherited, **ENVIRONMENT, **checkout, **device, **self.variables}

    def program(self) -> list[str]:
        """The program with all its flags."""
        program = str(self.checkout / self.program_file)
        if not self.share_gpu:
            return [program, *self.flags]
        return [program, *(flag for flag in self.flags if flag not in _FUSIONS), *_ON_GPU]


def add_share_gpu(parser: argparse.ArgumentParser) -> None:
    """Give a tool that launches jobs the flag that puts them on a GPU."""
    parser.add_argument(
        '--share-gpu',
        action='store_true',
        help='all ranks on the first GPU, over NCCL (default: on the CPU, over gloo)',
    )


class Death(NamedTuple):
    """A worker is gone."""

    rank: int
    pid: int
    code: int | None
    """Exit status; None: killed by a signal."""
    time: float
    """Seconds since the epoch at which the launcher said so."""

    def __str__(self) -> str:
        how = 'was killed' if self.code is None else f'ended with exit status {self.code}'
        return f'rank {self.rank} (pid {self.pid}) {how}'


def node_name(node: int) -> str:
    """Name of an emulated node, as in the folder of its host memory."""
    return f'node{node}'


def family(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Processes with everything that they have started and that still runs."""
    found = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.children(recursive=True)
    return found


def kill_groups(pids: Sequence[int]) -> None:
    """SIGKILL the process groups of processes, if they are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(os.getpgid(pid), signal.SIGKILL)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on.

    None of those that Linux gives to outgoing connections: an agent takes seconds to listen on it.
    """
    while True:
        port = random.randrange(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(('127.0.0.1', port))
            return port
