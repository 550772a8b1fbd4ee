# SPDX-License-Identifier: Apache-2.0
"""A training job under the launcher that replaces single workers, open to be watched and struck."""

import contextlib
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moevement_ext.launch.config import LaunchConfig
from moevement_ext.launch.events import Event, JobFailed, WorkerEnded
from moevement_ext.launch.supervisor import Supervisor
from moevement_ext.memory.store import NodeStore
from tools.chaos.flags import RUN_ID
from tools.demo import evidence
from tools.demo.failure import DemoError
from tools.demo.job import ROOT
from tools.plot_run import Iteration, RunLog, parse_log

PROGRAM = ROOT / 'pretrain_gpt.py'
_POLL_S = 0.05
_STALLED_S = 120
_TAIL_LINES = 12
_MAX_RESTARTS = 1000
_STOPPED = 130


class Job:
    """A running job; leaving the `with` block ends all its processes.

    Args:
        folder: for logs and events, made anew by the caller.
        flags: of `pretrain_gpt.py`.
        nodes: emulated nodes.
        workers_per_node: ranks on each.
        spares: hot spares.
        memory: directory in a tmpfs that holds the windows; None if no node is struck.
        max_restarts: deaths of workers after which the job is given up.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str],
        nodes: int,
        workers_per_node: int,
        spares: int = 0,
        memory: Path | None = None,
        max_restarts: int = _MAX_RESTARTS,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.config = LaunchConfig(
            program=str(PROGRAM),
            flags=tuple(flags),
            nodes=nodes,
            workers_per_node=workers_per_node,
            spares=spares,
            max_restarts=max_restarts,
            log_dir=folder / 'logs',
        )
        self._memory = memory
        self._doomed: set[int] = set()
        self._killed: set[int] = set()
        self.unexpected: list[WorkerEnded] = []
        """Workers that ended otherwise than well, but were not struck."""
        self.ended_at: dict[int, float] = {}
        """When the launcher saw a process end (seconds since the epoch), by process id."""
        self._failure: str | None = None
        self._supervisor = Supervisor(self.config, self._on_event)
        self._thread = threading.Thread(target=self._run, name='launcher')

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._supervisor.stop(_STOPPED)
        self._thread.join()

    @property
    def events_folder(self) -> Path:
        """Where the workers write their events."""
        return self.folder / 'events'

    def running(self) -> bool:
        """Whether the job still runs.

        Raises:
            DemoError: it was given up, with the end of the log of the last rank.
        """
        if self._failure is not None:
            raise DemoError(f'{self._failure}; see {self.folder}', self.tail())
        return self._thread.is_alive()

    def pids(self) -> list[int]:
        """Of the present workers, by rank."""
        return [worker.pid for worker in list(self._supervisor.workers)]

    def wait(self) -> None:
        """Wait until all of the job is gone, however it ended."""
        self._thread.join()

    def follow(self, what: str) -> Iterator[RunLog]:
        """What is logged so far, again and again while the job runs.

        Args:
            what: is waited for; part of the message if the job stands still.

        Raises:
            DemoError: the job failed or stands still.
        """
        lines, changed = 0, time.monotonic()
        while self.running():
            log = self.read_log()
            if len(log.iterations) != lines:
                lines, changed = len(log.iterations), time.monotonic()
            elif time.monotonic() - changed > _STALLED_S:
                message = f'no iteration in {_STALLED_S} s, waiting for {what}; see {self.folder}'
                raise DemoError(message, self.tail())
            yield log
            time.sleep(_POLL_S)

    def read_log(self) -> RunLog:
        """What the last rank has logged in all its lives."""
        return parse_log(self.text(self.config.world_size - 1))

    def text(self, rank: int) -> str:
        """Everything that a rank has printed."""
        log = self.config.log_of(rank)
        if log is None or not log.exists():
            return ''
        return log.read_text('utf-8', errors='replace')

    def iterations(self) -> list[Iteration]:
        """What the last rank has logged in all its lives, in order."""
        return self.read_log().iterations

    def events(self) -> list[dict[str, Any]]:
        """Events of all ranks so far, in the order of time."""
        return evidence.read_events(self.events_folder)

    def strike(self, ranks: Collection[int], number: signal.Signals) -> float:
        """Send a signal to workers; returns when (seconds since the epoch)."""
        struck_at = time.time()
        for rank in ranks:
            worker = self._supervisor.workers[rank]
            self._killed.add(worker.pid)
            # It may have died this moment.
            with contextlib.suppress(ProcessLookupError):
                worker.child.signal(number)
        return struck_at

    def strike_node(self, node: int) -> float:
        """Kill all workers of a node and delete its memory; returns when."""
        ranks = self.config.ranks_of(node)
        self._doomed = set(ranks)
        return self.strike(ranks, signal.SIGKILL)

    def tail(self) -> str:
        """The last lines of the logs of all ranks."""
        lines = []
        for rank in range(self.config.world_size):
            lines += [f'--- rank {rank}', *self.text(rank).splitlines()[-_TAIL_LINES:]]
        return '\n'.join(lines)

    def _run(self) -> None:
        try:
            code = self._supervisor.run()
        except Exception as error:
            self._failure = f'the launcher failed: {type(error).__name__}: {error}'
            raise
        if code not in (0, _STOPPED) and self._failure is None:
            self._failure = f'the job ended with exit status {code}'

    def _on_event(self, event: Event) -> None:
        """On the launcher's thread, before it replaces a worker that has ended."""
        with (self.folder / 'launcher.log').open('a', encoding='utf-8') as log:
            print(f'{time.time():.3f} {event}', file=log)
        if isinstance(event, JobFailed):
            self._failure = f'job failed: {event.reason}'
        if isinstance(event, WorkerEnded):
            self.ended_at[event.pid] = time.time()
            if event.code and event.pid not in self._killed:
                self.unexpected.append(event)
            if event.rank in self._doomed:
                self._delete_memory(self.config.node_of(event.rank))

    def _delete_memory(self, node: int) -> None:
        """No successor of these workers runs yet, and they must not write any more."""
        self._doomed = set()
        for rank in self.config.ranks_of(node):
            child = self._supervisor.workers[rank].child
            if not child.ended:
                child.wait()
        assert self._memory is not None
        NodeStore(self._memory, RUN_ID, f'node{node}').remove()
