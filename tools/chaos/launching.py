# SPDX-License-Identifier: Apache-2.0
"""The launchers of a struck job, each as processes of its own that can be lost like any other."""

import contextlib
import enum
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from tools.demo.job import ROOT

PROGRAM = ROOT / 'pretrain_gpt.py'
_GRACE_S = 15
_STARTED = re.compile(r'rank (\d+): (?:started|a hot spare takes over), pid (\d+), restart (\d+)')
_ENDED = re.compile(r'rank (\d+) \(pid (\d+)\) (was killed by .*|ended with exit status (\d+))')
_GIVEN_UP = re.compile(r'job failed: (.*)')
_FAILED = re.compile(r'failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)')


class Launcher(enum.StrEnum):
    """What starts the workers, and starts them again."""

    LOCAL = 'local'
    """`scripts/local_cluster.py`, one for all emulated nodes."""
    TORCHRUN = 'torchrun'
    """One agent for each emulated node, static rendezvous."""


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


class LocalCluster:
    """`scripts/local_cluster.py` as a process.

    Args:
        folder: for the logs.
        flags: of the program.
        environment: all of it.
        nodes: emulated nodes.
        workers_per_node: ranks on each.
        spares: hot spares.
        max_restarts: deaths of workers after which the job is given up.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str],
        environment: Mapping[str, str],
        nodes: int,
        workers_per_node: int,
        spares: int,
        max_restarts: int,
    ) -> None:
        self._folder = folder
        self._environment = environment
        self._command = [sys.executable, str(ROOT / 'scripts' / 'local_cluster.py')]
        self._command += ['--nodes', str(nodes), '--workers-per-node', str(workers_per_node)]
        self._command += ['--spares', str(spares), '--max-restarts', str(max_restarts)]
        self._command += ['--log-dir', str(folder / 'logs'), '--', str(PROGRAM), *flags]
        self._pids: dict[int, int] = {}
        self.deaths: list[Death] = []
        self.given_up = ''
        """Why the launcher ended the job."""

    def log_of(self, rank: int) -> Path:
        """What a rank prints in all its lives."""
        return self._folder / 'logs' / f'rank{rank}.log'

    def start(self) -> None:
        """Launch the job, or launch it again."""
        self._pids.clear()
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, env=self._environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._reader.start()

    def pids(self) -> dict[int, int]:
        """Present workers by rank, also those that still import."""
        return dict(self._pids)

    def exit_status(self) -> int | None:
        """Of the job; None while it runs."""
        if self._process.poll() is None:
            return None
        self._reader.join()
        return self._process.returncode

    def kill(self) -> None:
        """SIGKILL the launcher; its workers go with it."""
        self._process.kill()
        self._bury()

    def end(self) -> None:
        """Leave nothing of the job."""
        self._process.terminate()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._bury()

    def _bury(self) -> None:
        self._process.wait()
        ended = {death.pid for death in self.deaths}
        _kill([pid for pid in self._pids.values() if pid not in ended])
        self._reader.join()

    def _read(self, output: Iterator[str]) -> None:
        with (self._folder / 'launcher.log').open('a', encoding='utf-8') as log:
            for line in output:
                print(f'{time.time():.3f} {line}', end='', file=log, flush=True)
                self._note(line)

    def _note(self, line: str) -> None:
        if started := _STARTED.search(line):
            self._pids[int(started[1])] = int(started[2])
        elif ended := _ENDED.search(line):
            code = None if ended[4] is None else int(ended[4])
            self.deaths.append(Death(int(ended[1]), int(ended[2]), code, time.time()))
        elif given_up := _GIVEN_UP.search(line):
            self.given_up = given_up[1]


class Agents:
    """One `torchrun` agent with one worker for each emulated node.

    Args:
        folder: for the logs.
        flags: of the program.
        environment: all of it.
        nodes: emulated nodes; as many ranks.
        max_restarts: of each agent.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str],
        environment: Mapping[str, str],
        nodes: int,
        max_restarts: int,
    ) -> None:
        self._folder = folder
        self._environment = environment
        self._flags = flags
        self._nodes = nodes
        self._max_restarts = max_restarts
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self.given_up = ''

    def log_of(self, rank: int) -> Path:
        """What a rank and its agent print in all their lives."""
        return self._folder / 'logs' / f'agent{rank}.log'

    def start(self) -> None:
        """Launch the job, or launch it again."""
        self._port = _free_port()
        (self._folder / 'logs').mkdir(exist_ok=True)
        for node in range(self._nodes):
            self.start_agent(node)

    def start_agent(self, node: int) -> None:
        """Start the agent of a node, or start it again."""
        command = [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '1']
        command += ['--nnodes', str(self._nodes), '--node-rank', str(node)]
        command += ['--rdzv-backend', 'static', '--master-addr', '127.0.0.1']
        command += ['--master-port', str(self._port), '--max-restarts', str(self._max_restarts)]
        environment = {
            'CUDA_DEVICE_MAX_CONNECTIONS': '1',
            'TORCHDYNAMO_DISABLE': '1',
            **self._environment,
            'MOEVEMENT_NODE': f'node{node}',
        }
        with self.log_of(node).open('ab') as log:
            self._agents[node] = subprocess.Popen(
                [*command, str(PROGRAM), *self._flags], cwd=ROOT, env=environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def pids(self) -> dict[int, int]:
        """Present workers by rank."""
        agents = list(self._agents.items())
        return {node: pid for node, agent in agents for pid in _workers(agent.pid)}

    @property
    def deaths(self) -> list[Death]:
        """Workers whose failure their agents have reported, in no certain order."""
        found = []
        for node in range(self._nodes):
            text = self.log_of(node).read_text('utf-8', errors='replace')
            for code, pid in _FAILED.findall(text):
                status = None if int(code) < 0 else int(code)
                found.append(Death(node, int(pid), status, time.time()))
        return found

    def exit_status(self) -> int | None:
        """Of the job; None while it runs."""
        codes = [agent.poll() for agent in self._agents.values()]
        return next((code for code in codes if code), None if None in codes else 0)

    def kill(self) -> None:
        """SIGKILL all agents and their workers."""
        for node in self._agents:
            self.kill_agent(node)

    def kill_agent(self, node: int) -> list[int]:
        """SIGKILL an agent and its worker; returns the process ids of workers."""
        agent = self._agents[node]
        workers = _workers(agent.pid) if agent.poll() is None else []
        agent.kill()
        _kill(workers)
        agent.wait()
        return workers

    def end(self) -> None:
        """Leave nothing of the job."""
        for agent in self._agents.values():
            if agent.poll() is None:
                agent.terminate()
        deadline = time.monotonic() + _GRACE_S
        for agent in self._agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, deadline - time.monotonic()))
        self.kill()


def _workers(agent: int) -> list[int]:
    """Processes that an agent has started to train."""
    try:
        children = psutil.Process(agent).children()
    except psutil.NoSuchProcess:
        return []
    found = []
    for child in children:
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and str(PROGRAM) in child.cmdline():
                found.append(child.pid)
    return found


def _kill(pids: Sequence[int]) -> None:
    """SIGKILL processes and what they have started, if they are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(os.getpgid(pid), signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port: int = probe.getsockname()[1]
        return port
