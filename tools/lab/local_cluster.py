# SPDX-License-Identifier: Apache-2.0
"""Jobs under `scripts/local_cluster.py`, which replaces single workers on all emulated nodes."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tools.lab.launch import GRACE_S, ROOT, Death, Launch, kill_groups

_TAIL_LINES = 12
_STARTED = re.compile(r'rank (\d+): (?:started|a hot spare takes over), pid (\d+), restart (\d+)')
_ENDED = re.compile(r'rank (\d+) \(pid (\d+)\) (was killed by .*|ended with exit status (\d+))')
_GIVEN_UP = re.compile(r'job failed: (.*)')


def log_file(folder: Path, rank: int) -> Path:
    """What a rank printed in a job whose folder this is."""
    return folder / 'logs' / f'rank{rank}.log'


class LocalCluster:
    """The launcher as a process, that can be lost like any other. One thread uses it.

    Args:
        launch: what it runs.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._command = [sys.executable, str(ROOT / 'scripts' / 'local_cluster.py')]
        self._command += ['--nodes', str(launch.nodes)]
        self._command += ['--workers-per-node', str(launch.workers_per_node)]
        self._command += ['--spares', str(launch.spares)]
        self._command += ['--fork'] if launch.fork else []
        self._command += ['--max-restarts', str(launch.max_restarts)]
        self._command += ['--share-gpu'] if launch.share_gpu else []
        self._command += ['--log-dir', str(launch.folder / 'logs'), '--', *launch.program()]
        self._pids: dict[int, int] = {}
        self.deaths: list[Death] = []
        self.given_up = ''
        """Why the launcher ended the job."""

    def start(self) -> None:
        """Launch the job, or launch it again."""
        self._pids.clear()
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._launch.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._reader.start()

    def log_of(self, rank: int) -> Path:
        """What a rank prints in all its lives."""
        return log_file(self._launch.folder, rank)

    def pids(self) -> dict[int, int]:
        """Present workers by rank, also those that still import."""
        return dict(self._pids)

    def exit_status(self) -> int | None:
        """Exit status of the job's launcher; None while it runs."""
        if self._process.poll() is None:
            return None
        self._reader.join()
        return self._process.returncode

    def tail(self) -> str:
        """The last lines of the logs of all ranks."""
        lines = []
        for rank in range(self._launch.world_size):
            log = self.log_of(rank)
            text = log.read_text('utf-8', errors='replace') if log.exists() else ''
            lines += [f'--- rank {rank}', *text.splitlines()[-_TAIL_LINES:]]
        return '\n'.join(lines)

    def kill(self) -> None:
        """SIGKILL the launcher; its workers go with it."""
        self._process.kill()
        self._bury()

    def end(self) -> None:
        """Leave nothing of the job, politely first."""
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._bury()

    def _bury(self) -> None:
        self._process.wait()
        ended = {death.pid for death in self.deaths}
        kill_groups([pid for pid in self._pids.values() if pid not in ended])
        self._reader.join()

    def _read(self, output: Iterator[str]) -> None:
        with (self._launch.folder / 'launcher.log').open('a', encoding='utf-8') as log:
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
