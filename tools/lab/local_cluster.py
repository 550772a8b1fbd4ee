# SPDX-License-Identifier: Apache-2.0
"""Jobs under `moevement launch`, which replaces single workers on all emulated nodes."""

import select
import signal
from pathlib import Path

from moevement_ext.launch.child import SpawnedChild
from moevement_ext.launch.launcher_events import FILE, JobFailed, WorkerEnded, WorkerLaunched

from .following import FollowedFile
from .launch import GRACE_S, Death, Launch, kill_groups

_TAIL_LINES = 12


def log_file(folder: Path, rank: int) -> Path:
    return folder / 'logs' / f'rank{rank}.log'


class LocalCluster:
    """The launcher as a process that can be killed like any other. Used from one thread."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._command = ['-m', 'moevement_ext.launch.command_line']
        self._command += ['--nodes', str(launch.nodes)]
        self._command += ['--workers-per-node', str(launch.workers_per_node)]
        self._command += ['--spares', str(launch.spares)]
        self._command += ['--max-restarts', str(launch.max_restarts)]
        self._command += ['--share-gpu'] if launch.share_gpu else []
        self._command += ['--log-dir', str(launch.folder / 'logs'), '--', *launch.program()]
        self._events = FollowedFile(launch.folder / 'logs' / FILE)
        self._pids: dict[int, int] = {}
        self._deaths: list[Death] = []
        self._given_up = ''

    def start(self) -> None:
        self._pids.clear()
        with (self._launch.folder / 'launcher.log').open('ab') as log:
            self._process = SpawnedChild(self._command, self._launch.environment(), log)
        self._code: int | None = None

    def log_of(self, rank: int) -> Path:
        return log_file(self._launch.folder, rank)

    def pids(self) -> dict[int, int]:
        """Present workers by rank, including those that still import."""
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

    def exit_status(self) -> int | None:
        return self._wait(0.0)

    def tail(self) -> str:
        lines = []
        for rank in range(self._launch.world_size):
            log = self.log_of(rank)
            text = log.read_text('utf-8', errors='replace') if log.exists() else ''
            lines += [f'--- rank {rank}', *text.splitlines()[-_TAIL_LINES:]]
        return '\n'.join(lines)

    def kill(self) -> None:
        self._process.signal(signal.SIGKILL)
        self._reap()

    def end(self) -> None:
        self._process.signal(signal.SIGTERM)
        if self._wait(GRACE_S) is None:
            self._process.signal(signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        self._wait(None)
        ended = {death.pid for death in self.deaths}
        kill_groups([pid for pid in self._pids.values() if pid not in ended])

    def _wait(self, seconds: float | None) -> int | None:
        """Exit status of the launcher; None if it does not end in time."""
        if self._code is None:
            poll = select.poll()
            poll.register(self._process.death, select.POLLIN)
            if poll.poll(None if seconds is None else 1000 * seconds):
                self._code = self._process.reap()
        return self._code

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
