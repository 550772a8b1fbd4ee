# SPDX-License-Identifier: Apache-2.0
"""A training job on emulated nodes, to be followed, and to lose workers and nodes."""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.events import Event
from tools.lab.errors import LabError
from tools.lab.evidence import read_events
from tools.lab.launch import Death, Launch, Launcher, node_name
from tools.lab.local_cluster import LocalCluster
from tools.lab.run_log import RunLog, parse_log
from tools.lab.torchrun import Agents

_POLL_S = 0.1
_STALLED_S = 300
_ALL_STARTED_S = 30


class LostNode(NamedTuple):
    """A node that was lost on purpose."""

    at: float
    """Seconds since the epoch."""
    nbytes: int
    """That it had in host memory."""


class Job:
    """A running job; leaving the `with` block ends all its processes. One thread uses it.

    Args:
        launch: what runs.
        launcher: starts the workers.
    """

    def __init__(self, launch: Launch, launcher: Launcher = Launcher.LOCAL) -> None:
        launch.folder.mkdir(parents=True)
        self.folder = launch.folder
        self.world_size = launch.world_size
        self.workers_per_node = launch.workers_per_node
        self._launcher: LocalCluster | Agents
        self._launcher = Agents(launch) if launcher is Launcher.TORCHRUN else LocalCluster(launch)
        self._faulted: set[int] = set()

    def __enter__(self) -> Self:
        self._launcher.start()
        deadline = time.monotonic() + _ALL_STARTED_S
        while len(self._launcher.pids()) < self.world_size and time.monotonic() < deadline:
            if self._launcher.exit_status() is not None:
                break
            time.sleep(_POLL_S / 10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ended = self.ended_at
        self._faulted.update(pid for pid in self.pids() if pid not in ended)
        self._launcher.end()

    # What it does

    def running(self) -> bool:
        """Whether the job still runs.

        Raises:
            LabError: it was given up, with the end of the log that tells most.
        """
        code = self._launcher.exit_status()
        if code:
            why = self._launcher.given_up or f'the job ended with exit status {code}'
            raise LabError(f'{why}; see {self.folder}', self.tail())
        return code is None

    def wait(self) -> None:
        """Wait until all of the job is gone, however it ended."""
        while self._launcher.exit_status() is None:
            time.sleep(_POLL_S)

    def follow(self, what: str, poll_s: float = _POLL_S) -> Iterator[RunLog]:
        """What is logged so far, again and again while the job runs.

        Args:
            what: is waited for; part of the message if the job stands still.
            poll_s: seconds between two looks.

        Raises:
            LabError: the job failed or stands still.
        """
        lines, changed = 0, time.monotonic()
        while self.running():
            log = self.read_log()
            if len(log.iterations) != lines:
                lines, changed = len(log.iterations), time.monotonic()
            elif time.monotonic() - changed > _STALLED_S:
                message = f'no iteration in {_STALLED_S} s, waiting for {what}; see {self.folder}'
                raise LabError(message, self.tail())
            yield log
            time.sleep(poll_s)

    def finish(self) -> RunLog:
        """Let the job come to its end; returns all that it logged.

        Raises:
            LabError: the job failed or stands still.
        """
        for _ in self.follow('the end'):
            pass
        return self.read_log()

    @property
    def log(self) -> Path:
        """Where the last rank writes, which logs the iterations."""
        return self._launcher.log_of(self.world_size - 1)

    def text(self) -> str:
        """Everything that is in `log`, empty before there is one."""
        return self.log.read_text('utf-8', errors='replace') if self.log.exists() else ''

    def read_log(self) -> RunLog:
        """What the last rank has logged in all its lives."""
        return parse_log(self.text())

    @property
    def events_folder(self) -> Path:
        """Where the workers write their events, if their flags say so."""
        return self.folder / 'events'

    def events(self) -> list[Event]:
        """Events of all ranks so far, in the order of time."""
        return read_events(self.events_folder)

    def tail(self) -> str:
        """The end of the log that tells most of what went wrong."""
        return self._launcher.tail()

    # Its processes

    def pids(self) -> list[int]:
        """Process ids of the present workers, by rank; 0 where there is none."""
        pids = self._launcher.pids()
        return [pids.get(rank, 0) for rank in range(self.world_size)]

    @property
    def ended_at(self) -> dict[int, float]:
        """When the launcher saw a process end (seconds since the epoch), by process id."""
        return {death.pid: death.time for death in self._launcher.deaths}

    @property
    def unexpected(self) -> list[Death]:
        """Workers that ended otherwise than well, though no fault was put on them.

        Those that ended so that the launcher starts the whole job again did as they should.
        """
        return [
            death
            for death in self._launcher.deaths
            if death.code not in (0, EXIT_WHOLE_JOB) and death.pid not in self._faulted
        ]

    def ranks_of_node(self, rank: int) -> range:
        """All ranks on the node of a rank."""
        first = rank // self.workers_per_node * self.workers_per_node
        return range(first, first + self.workers_per_node)

    # Faults

    def send(self, ranks: Collection[int], number: signal.Signals) -> float:
        """Signal workers and all that they have started; returns when (seconds since the epoch)."""
        pids = self._launcher.pids()
        signalled_at = time.time()
        for pid in (pids[rank] for rank in ranks if rank in pids):
            self._faulted.add(pid)
            with contextlib.suppress(ProcessLookupError):  # it may have died this moment
                os.killpg(pid, number)
        return signalled_at

    def lose_node(self, rank: int, memory: Path) -> LostNode:
        """Kill all workers of the node of a rank and delete its memory.

        They stand still first: nobody may write what is deleted, and no successor may find it.

        Args:
            rank: any on the node.
            memory: host memory of the run, all nodes.

        Raises:
            LabError: the node has no memory.
        """
        ranks = self.ranks_of_node(rank)
        self.send(ranks, signal.SIGSTOP)
        node = node_name(rank // self.workers_per_node)
        if not (memory / node).is_dir():
            raise LabError(f'{memory / node} is missing; {node} has no memory to lose')
        files = (path for path in (memory / node).rglob('*') if path.is_file())
        nbytes = sum(path.stat().st_size for path in files)
        shutil.rmtree(memory / node)
        return LostNode(self.send(ranks, signal.SIGKILL), nbytes)


@contextlib.contextmanager
def memory_directory(
    prefix: str = 'moevement-bench-', shm: Path = Path('/dev/shm')
) -> Iterator[Path]:
    """A directory in a tmpfs that is gone afterwards.

    Args:
        prefix: of its name.
        shm: where the tmpfs is mounted, or a directory in it.

    Raises:
        LabError: there is none.
    """
    if not shm.is_dir():
        raise LabError(f'{shm} is missing; windows are kept in this tmpfs of Linux')
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=shm, ignore_cleanup_errors=True
    ) as directory:
        yield Path(directory)
