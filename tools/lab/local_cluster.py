# SPDX-License-Identifier: Apache-2.0
"""Jobs under `moevement launch`, which replaces single workers on all emulated nodes."""

import sys
from collections.abc import Iterable
from pathlib import Path

from moevement_ext.launch.launch_config import StagedAction
from moevement_ext.launch.launcher_events import (
    FILE,
    GuestsSeated,
    JobFailed,
    NodeSeated,
    WorkerEnded,
    WorkerLaunched,
)

from .following import FollowedFile
from .launch import PACKAGE, Death, Launch, Launched, as_flags

_LAUNCHER, _UNSPARED = 'moevement_ext.launch.command_line', f'{PACKAGE}.lab.unspared'
_TAIL_LINES = 12
ORDERS = 'orders'
"""File in the folder of the logs. A line has the action of a staged failure, and the node."""


class LocalCluster(Launched):
    """One launcher for all nodes, as a process that can be killed like any other."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        self._events = FollowedFile(launch.logs / FILE)
        self._pids: dict[int, int] = {}
        self._moved: set[int] = set()  # processes of nodes that have moved since
        self._deaths: list[Death] = []
        self._given_up = ''

    def start(self) -> None:
        self._pids.clear()
        log = self._launch.folder / 'launcher.log'
        self._start(0, self.command(), self._launch.environment(), log)

    def command(self) -> list[str]:
        launch = self._launch
        flags = as_flags(
            nodes=launch.nodes,
            workers_per_node=launch.workers_per_node,
            spares=launch.spares,
            max_restarts=launch.max_restarts,
            share_gpu=launch.share_gpu,
            when_no_spare='guests' if launch.guests else None,
            log_dir=launch.logs,
        )
        module = _UNSPARED if launch.guests else _LAUNCHER
        return [sys.executable, '-m', module, *flags, '--', *launch.program()]

    def log_of(self, rank: int) -> Path:
        return self._launch.logs / f'rank{rank}.log'

    def hosts(self) -> dict[int, str]:
        self._note_events()
        return super().hosts()

    def order(self, action: StagedAction, nodes: Iterable[int]) -> None:
        """Let nodes be lost for good, or return."""
        with (self._launch.logs / ORDERS).open('a') as file:
            file.writelines(f'{action} {node}\n' for node in nodes)

    def pids(self) -> dict[int, int]:
        self._note_events()
        return dict(self._pids)

    @property
    def deaths(self) -> list[Death]:
        self._note_events()
        return list(self._deaths)

    @property
    def given_up(self) -> str:
        self._note_events()
        return self._given_up

    def tail(self) -> str:
        lines = []
        for rank in range(self._launch.world_size):
            log = self.log_of(rank)
            text = log.read_text('utf-8', errors='replace') if log.exists() else ''
            lines += [f'--- rank {rank}', *text.splitlines()[-_TAIL_LINES:]]
        return '\n'.join(lines)

    def _note_events(self) -> None:
        for event in self._events.read_new():
            match event:
                case WorkerLaunched(rank, pid):
                    self._pids[rank] = pid
                case NodeSeated(host, node) | GuestsSeated(host, node):
                    self._hosts[node] = host
                    ranks = self._launch.ranks_of(node)
                    self._moved.update(self._pids.get(rank, 0) for rank in ranks)
                case WorkerEnded(rank, pid, code) if pid not in self._moved:
                    status = None if code < 0 else code
                    self._deaths.append(Death(rank, pid, status, event.time))
                case JobFailed(reason):
                    self._given_up = reason.partition('\n')[0]
