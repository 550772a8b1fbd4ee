# SPDX-License-Identifier: Apache-2.0
"""A training job on emulated nodes: one torchrun agent per node, as on a cluster."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tools.demo.failure import DemoError
from tools.plot_run import RunLog, parse_log

ROOT = Path(__file__).resolve().parents[2]
NODES = ('node-0', 'node-1')
WORKERS_PER_NODE = 2
WORLD_SIZE = len(NODES) * WORKERS_PER_NODE

_PROGRAM = 'pretrain_gpt.py'
_TAIL_LINES = 30
_GRACE_SECONDS = 10
_TRACEBACK = re.compile(r'^\[rank(\d+)\]: ?(Traceback|\w*Error|.*error: )', re.MULTILINE)

_ENVIRONMENT = {
    # One thread a process keeps the order of summation, hence the bits, the same everywhere.
    'OMP_NUM_THREADS': '1',
    'CUDA_DEVICE_MAX_CONNECTIONS': '1',
    'CUDA_VISIBLE_DEVICES': '',  # the demo is the same with and without a GPU
    'GLOO_SOCKET_IFNAME': 'lo',
    'TORCHDYNAMO_DISABLE': '1',
    'PYTHONUNBUFFERED': '1',
    'PYTHONWARNINGS': 'ignore',
}


class Job:
    """A running job; leaving the `with` block ends all its processes.

    Args:
        folder: for the logs, made anew by the caller.
        flags: of `pretrain_gpt.py`.
        max_restarts: how often each agent may start its workers again.
        workers_per_node: ranks on each of the emulated nodes.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str],
        max_restarts: int,
        workers_per_node: int = WORKERS_PER_NODE,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        port = _free_port()
        self._logs = [folder / f'{node}.log' for node in NODES]
        launch = ['--master-port', str(port), '--max-restarts', str(max_restarts)]
        launch += ['--nproc-per-node', str(workers_per_node)]
        self._agents = [self._start_agent(node, launch, flags) for node, _ in enumerate(NODES)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    @property
    def log(self) -> Path:
        """Where the last rank writes, which logs the iterations."""
        return self._logs[-1]

    def read_log(self) -> RunLog:
        """What the job logged so far."""
        return parse_log(self.log.read_text('utf-8', errors='replace'))

    def running(self) -> bool:
        """Whether the job still runs.

        Raises:
            DemoError: an agent gave up, with the tail of the log of the worker that failed.
        """
        codes = [agent.poll() for agent in self._agents]
        for node, code in zip(NODES, codes, strict=True):
            if code:
                raise DemoError(f'the job failed on {node} (exit status {code})', self.tail())
        return None in codes

    def workers(self, node: int | None = None) -> list[psutil.Process]:
        """The worker processes that run now, of one node or of all."""
        agents = self._agents if node is None else [self._agents[node]]
        return [
            process
            for agent in agents
            for process in psutil.Process(agent.pid).children()
            if _PROGRAM in _command_line(process)
        ]

    def kill_workers(self, node: int | None = None) -> int:
        """SIGKILL the workers of one node or of all; returns how many when they are gone.

        The agents stay. So do not what workers started (upstream's checkpoint writers), as when a
        node fails.
        """
        workers = self.workers(node)
        _kill(_with_children(workers))
        psutil.wait_procs(workers, timeout=_GRACE_SECONDS)
        return len(workers)

    def _start_agent(
        self, number: int, launch: Sequence[str], flags: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, '-m', 'torch.distributed.run',
            '--nnodes', str(len(NODES)),
            '--node-rank', str(number),
            '--rdzv-backend', 'static',
            '--master-addr', '127.0.0.1',
            *launch,
            '--log-dir', str(self.folder / 'workers'),
            '--tee', '3',
            '--log-line-prefix-template', '[rank${rank}]: ',
            str(ROOT / _PROGRAM),
            *flags,
        ]  # fmt: skip
        environment = {**os.environ, **_ENVIRONMENT, 'MOEVEMENT_NODE': NODES[number]}
        environment.pop('MOEVEMENT_FAIL_AT', None)
        with open(self._logs[number], 'wb') as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then stops the job
            )

    def _stop(self) -> None:
        """End agents and workers, politely first."""
        agents = [psutil.Process(agent.pid) for agent in self._agents if agent.poll() is None]
        family = _with_children(agents)
        for agent in agents:
            agent.terminate()
        left = psutil.wait_procs(family, timeout=_GRACE_SECONDS)[1]
        _kill(_with_children(left))
        for started in self._agents:
            started.wait()

    def tail(self) -> str:
        """The last lines of the worker that failed first, else of the agents."""
        text = '\n'.join(log.read_text('utf-8', errors='replace') for log in self._logs)
        failed = _TRACEBACK.search(text)
        lines = text.splitlines()
        if failed:
            lines = [line for line in lines if line.startswith(f'[rank{failed[1]}]:')]
        return '\n'.join(lines[-_TAIL_LINES:])


def _command_line(process: psutil.Process) -> str:
    try:
        return ' '.join(process.cmdline())
    except psutil.NoSuchProcess:
        return ''


def _with_children(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    found = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.children(recursive=True)
    return found


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port: int = probe.getsockname()[1]
        return port
