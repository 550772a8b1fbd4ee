# SPDX-License-Identifier: Apache-2.0
"""A job that faults of all kinds are put on."""

import contextlib
import os
import signal
import time
from pathlib import Path

from tools.lab.errors import LabError
from tools.lab.evidence import recovers_locally
from tools.lab.job import Job
from tools.lab.launch import Death, Launch, Launcher
from tools.lab.torchrun import Agents

_STALL = 'stall'


class TargetJob(Job):
    """A running job under a launcher that replaces single workers. One thread uses it.

    Args:
        launch: what runs.
        launcher: starts the workers.
        memory: host memory of the run, all nodes.
    """

    def __init__(self, launch: Launch, launcher: Launcher, memory: Path) -> None:
        self._stall = launch.folder / _STALL
        variables = {**launch.variables, 'MOEVEMENT_STALL_FILE': str(self._stall)}
        super().__init__(launch._replace(variables=variables), launcher)
        self._memory = memory

    @property
    def unexpected(self) -> list[Death]:
        """Deaths without a fault; none where any loss restarts the whole job.

        No worker survives another there: under torchrun they end by the error of the connection.
        """
        return super().unexpected if recovers_locally(self.events()) else []

    def lose_node_of(self, rank: int) -> float:
        """Kill all workers of the node of a rank and delete its memory; returns when.

        Raises:
            LabError: the node has no memory.
        """
        return self.lose_node(rank, self._memory).at

    def lose_agent(self, rank: int) -> float:
        """Kill the agent of a rank with its worker, and start it again; returns when.

        Raises:
            LabError: the job does not run under torchrun.
        """
        if not isinstance(self._launcher, Agents):
            raise LabError('only a job under torchrun has agents to lose')
        self._faulted.add(self.pids()[rank])
        lost_at = time.time()
        self._faulted.update(self._launcher.kill_agent(rank // self.workers_per_node))
        self._launcher.start_agent(rank // self.workers_per_node)
        return lost_at

    def launch_again(self) -> float:
        """Kill launcher and workers, and launch the same job again; returns when."""
        self._faulted.update(self._launcher.pids().values())
        killed_at = time.time()
        self._launcher.kill()
        self._launcher.start()
        return killed_at

    def stick(self, rank: int) -> float:
        """Let the loader of a worker wait for ever; returns when."""
        pid = self.pids()[rank]
        self._faulted.add(pid)
        stuck_at = time.time()
        self._stall.with_name(f'{_STALL}.{pid}').touch()
        return stuck_at

    def release(self, pid: int) -> None:
        """Let a worker run on that was only held."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
