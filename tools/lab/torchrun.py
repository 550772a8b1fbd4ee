# SPDX-License-Identifier: Apache-2.0
"""Jobs under torchrun: one agent for each emulated node, as on a cluster."""

import contextlib
import re
import secrets
import sys
import time
from pathlib import Path

import psutil

from moevement_ext.events import WorkerStarted

from .evidence import kind_of
from .following import Follower
from .launch import Death, Launch, Launched, as_flags, free_port, node_name
from .programs import LabError

# A module that selects the first GPU, then becomes the program.
_SHARING = ('-m', 'moevement_ext.launch.shared_gpu')
_TAIL_LINES = 30
_FAILED = re.compile(r'failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)')
_TRACEBACK = re.compile(r'^\[rank(\d+)\]: ?(Traceback|\w*Error|.*error: )', re.MULTILINE)


class Agents(Launched):
    """The agents of one job and their workers."""

    MODULE = 'torch.distributed.run'

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        # A user sets it on all nodes: without it the job refuses the successor of a lost node.
        self._secret = secrets.token_hex(16)

    def start(self) -> None:
        self._port = free_port()
        self._launch.logs.mkdir(exist_ok=True)
        for node in range(self._launch.nodes):
            self.start_agent(node)

    def start_agent(self, node: int) -> None:
        environment = {'MOEVEMENT_SECRET': self._secret, **self._launch.environment()}
        environment['MOEVEMENT_NODE'] = node_name(node)
        self._start(node, self.command(node, self._port), environment, self._log(node))

    def command(self, node: int, port: int) -> list[str]:
        """Command line of a node's agent; `port` is the port of the rendezvous."""
        launch = self._launch
        own = self._rendezvous(node, port) | {
            'nproc_per_node': launch.workers_per_node,
            'max_restarts': launch.max_restarts,
            'log_dir': launch.folder / 'workers',
            'tee': 3,
        }
        sharing = _SHARING if launch.share_gpu else ()
        return [sys.executable, '-m', self.MODULE, *as_flags(**own), *sharing, *launch.program()]

    def _rendezvous(self, node: int, port: int) -> dict[str, object]:
        """Flags by which the agents find each other, and those that only they have."""
        return {
            'nnodes': self._launch.nodes,
            'node_rank': node,
            'rdzv_backend': 'static',
            'master_addr': '127.0.0.1',
            'master_port': port,
            'log_line_prefix_template': '[rank${rank}]: ',
        }

    def log_of(self, rank: int) -> Path:
        return self._log(rank // self._launch.workers_per_node)

    def pids(self) -> dict[int, int]:
        found = {}
        for agent in self._launchers.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(agent.pid).children():
                    with contextlib.suppress(psutil.Error):
                        variables = child.environ()
                        # Other children, or one just being created, have no rank.
                        is_worker = 'TORCHELASTIC_RUN_ID' in variables
                        if is_worker and child.status() != psutil.STATUS_ZOMBIE:
                            found[int(variables['RANK'])] = child.pid
        return found

    @property
    def deaths(self) -> list[Death]:
        found = []
        for node in range(self._launch.nodes):
            for code, local_rank, pid in _FAILED.findall(self._text(node)):
                rank = node * self._launch.workers_per_node + int(local_rank)
                status = None if int(code) < 0 else int(code)
                found.append(Death(rank, int(pid), status, time.time()))
        return found

    @property
    def given_up(self) -> str:
        for node, agent in self._launchers.items():
            if agent.poll():
                return f'the job failed on {node_name(node)} (exit status {agent.returncode})'
        return ''

    def tail(self) -> str:
        """Last lines of the worker that failed first, else of the agents."""
        text = '\n'.join(self._text(node) for node in range(self._launch.nodes))
        failed = _TRACEBACK.search(text)
        lines = text.splitlines()
        if failed:
            lines = [line for line in lines if line.startswith(f'[rank{failed[1]}]:')]
        return '\n'.join(lines[-_TAIL_LINES:])

    def _log(self, node: int) -> Path:
        return self._launch.logs / f'{node_name(node)}.log'

    def _text(self, node: int) -> str:
        return self._log(node).read_text('utf-8', errors='replace')


class ForkingAgents(Agents):
    """Agents of `moevement torchrun`; the environment of their workers, forks, shows no rank."""

    MODULE = 'moevement_ext.launch.torchrun'

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        self._started: dict[int, int] = {}
        self._events = Follower(launch.folder / 'events')

    def pids(self) -> dict[int, int]:
        with contextlib.suppress(LabError):  # no worker has started
            self._started.update(
                (one.rank, one.pid) for one in kind_of(self._events.read_new(), WorkerStarted)
            )
        return {rank: pid for rank, pid in self._started.items() if psutil.pid_exists(pid)}
