# SPDX-License-Identifier: Apache-2.0
"""Jobs under `moevement launch`, which replaces single workers on all emulated nodes."""

import sys
from pathlib import Path

from moevement_ext.launch.launcher_events import FILE, JobFailed, WorkerEnded, WorkerLaunched

from .following import FollowedFile
from .launch import Death, Launch, Launched

_TAIL_LINES = 12


def log_file(folder: Path, rank: int) -> Path:
    return folder / 'logs' / f'rank{rank}.log'


class LocalCluster(Launched):
    """One launcher for all nodes, as a process that can be killed like any other."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        self._events = FollowedFile(launch.logs / FILE)
        self._pids: dict[int, int] = {}
        self._deaths: list[Death] = []
        self._given_up = ''

    def start(self) -> None:
        self._pids.clear()
        log = self._launch.folder / 'launcher.log'
        self._start(0, self.command(), self._launch.environment(), log)

    def command(self) -> list[str]:
        launch = self._launch
        return [
            sys.executable, '-m', 'moevement_ext.launch.command_line',
            '--nodes', str(launch.nodes),
            '--workers-per-node', str(launch.workers_per_node),
            '--spares', str(launch.spares),
            '--max-restarts', str(launch.max_restarts),
            *(['--share-gpu'] if launch.share_gpu else []),
            '--log-dir', str(launch.logs), '--', *launch.program(),
        ]  # fmt: skip

    def log_of(self, rank: int) -> Path:
        return log_file(self._launch.folder, rank)

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
        for event in self._events.look():
            match event:
                case WorkerLaunched(rank, pid):
                    self._pids[rank] = pid
                case WorkerEnded(rank, pid, code):
                    status = None if code < 0 else code
                    self._deaths.append(Death(rank, pid, status, event.time))
                case JobFailed(reason):
                    self._given_up = reason.partition('\n')[0]
