# SPDX-License-Identifier: Apache-2.0
"""Jobs under torchrun: one agent for each emulated node, as on a cluster."""

import contextlib
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from .launch import (
    GRACE_S,
    Death,
    Launch,
    family,
    free_port,
    kill_groups,
    node_name,
)

# A module that selects the first GPU, then becomes the program.
_SHARING = ('-m', 'moevement_ext.launch.shared_gpu')
_TAIL_LINES = 30
_FAILED = re.compile(r'failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)')
_TRACEBACK = re.compile(r'^\[rank(\d+)\]: ?(Traceback|\w*Error|.*error: )', re.MULTILINE)


class Agents:
    """The agents of one job and their workers. Used from one thread."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._logs = launch.folder / 'logs'
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        # A user sets it on all nodes: without it the job refuses the successor of a lost node.
        self._secret = secrets.token_hex(16)

    def start(self) -> None:
        self._port = free_port()
        self._logs.mkdir(exist_ok=True)
        for node in range(self._launch.nodes):
            self.start_agent(node)

    def start_agent(self, node: int) -> None:
        environment = {'MOEVEMENT_SECRET': self._secret, **self._launch.environment()}
        environment['MOEVEMENT_NODE'] = node_name(node)
        with self._log(node).open('ab') as log:
            self._agents[node] = subprocess.Popen(
                self.command(node, self._port),
                cwd=self._launch.checkout,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this tool, which then ends the job
            )

    def command(self, node: int, port: int) -> list[str]:
        """Command line of a node's agent; `port` is the port of the rendezvous."""
        launch = self._launch
        return [
            sys.executable, '-m', 'torch.distributed.run',
            '--nnodes', str(launch.nodes),
            '--nproc-per-node', str(launch.workers_per_node),
            '--node-rank', str(node),
            '--rdzv-backend', 'static',
            '--master-addr', '127.0.0.1',
            '--master-port', str(port),
            '--max-restarts', str(launch.max_restarts),
            '--log-dir', str(launch.folder / 'workers'),
            '--tee', '3',
            '--log-line-prefix-template', '[rank${rank}]: ',
            *(_SHARING if launch.share_gpu else ()),
            *launch.program(),
        ]  # fmt: skip

    def log_of(self, rank: int) -> Path:
        """Log file of the workers on a rank's node and their agent, over all their processes."""
        return self._log(rank // self._launch.workers_per_node)

    def pids(self) -> dict[int, int]:
        agents = list(self._agents.values())
        return {rank: pid for agent in agents for rank, pid in _workers(agent.pid).items()}

    @property
    def deaths(self) -> list[Death]:
        """Workers whose failure the agents have reported, unordered."""
        found = []
        for node in range(self._launch.nodes):
            for code, local_rank, pid in _FAILED.findall(self._text(node)):
                rank = node * self._launch.workers_per_node + int(local_rank)
                status = None if int(code) < 0 else int(code)
                found.append(Death(rank, int(pid), status, time.time()))
        return found

    @property
    def given_up(self) -> str:
        for node, agent in self._agents.items():
            if agent.poll():
                return f'the job failed on {node_name(node)} (exit status {agent.returncode})'
        return ''

    def exit_status(self) -> int | None:
        """Exit status of a failed agent, else 0; None while the job runs."""
        codes = [agent.poll() for agent in self._agents.values()]
        return next((code for code in codes if code), None if None in codes else 0)

    def tail(self) -> str:
        """Last lines of the worker that failed first, else of the agents."""
        text = '\n'.join(self._text(node) for node in range(self._launch.nodes))
        failed = _TRACEBACK.search(text)
        lines = text.splitlines()
        if failed:
            lines = [line for line in lines if line.startswith(f'[rank{failed[1]}]:')]
        return '\n'.join(lines[-_TAIL_LINES:])

    def kill(self) -> None:
        for node in self._agents:
            self.kill_agent(node)

    def kill_agent(self, node: int) -> list[int]:
        """SIGKILL an agent and its workers; returns the process ids of workers."""
        agent = self._agents[node]
        workers = list(_workers(agent.pid).values()) if agent.poll() is None else []
        agent.kill()
        kill_groups(workers)
        agent.wait()
        return workers

    def end(self) -> None:
        running = [agent for agent in self._agents.values() if agent.poll() is None]
        everybody = family([psutil.Process(agent.pid) for agent in running])
        for agent in running:
            agent.terminate()
        left = psutil.wait_procs(everybody, timeout=GRACE_S)[1]
        for process in family(left):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for agent in self._agents.values():
            agent.wait()

    def _log(self, node: int) -> Path:
        return self._logs / f'{node_name(node)}.log'

    def _text(self, node: int) -> str:
        return self._log(node).read_text('utf-8', errors='replace')


def _workers(agent: int) -> dict[int, int]:
    try:
        children = psutil.Process(agent).children()
    except psutil.NoSuchProcess:
        return {}
    found = {}
    for child in children:
        with contextlib.suppress(psutil.Error):
            rank = _rank(child.environ())
            if rank is not None and child.status() != psutil.STATUS_ZOMBIE:
                found[rank] = child.pid
    return found


def _rank(environment: Mapping[str, str]) -> int | None:
    """Rank of a worker; other children of an agent (or one just being created) have none."""
    if 'TORCHELASTIC_RUN_ID' not in environment:
        return None
    return int(environment['RANK'])
