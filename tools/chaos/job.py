# SPDX-License-Identifier: Apache-2.0
"""A training job under a launcher that replaces single workers, open to be watched and struck."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moevement_ext.errors import EXIT_WHOLE_JOB
from tools.chaos.flags import RUN_ID
from tools.chaos.launching import Agents, Death, Launcher, LocalCluster
from tools.demo import evidence
from tools.demo.failure import DemoError
from tools.plot_run import Iteration, RunLog, parse_log

_POLL_S = 0.1
_STALLED_S = 180
_TAIL_LINES = 12
_MAX_RESTARTS = 1000
_ALL_STARTED_S = 30
_STALL = 'stall'


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
        launcher: starts the workers.
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
        launcher: Launcher = Launcher.LOCAL,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.world_size = nodes * workers_per_node
        self.workers_per_node = workers_per_node
        self._memory = memory
        self._struck: set[int] = set()
        environment = {**os.environ, 'MOEVEMENT_STALL_FILE': str(folder / _STALL)}
        self._launcher: LocalCluster | Agents
        if launcher is Launcher.TORCHRUN:
            self._launcher = Agents(folder, flags, environment, nodes, max_restarts)
        else:
            self._launcher = LocalCluster(
                folder, flags, environment, nodes, workers_per_node, spares, max_restarts
            )

    def __enter__(self) -> Self:
        self._launcher.start()
        deadline = time.monotonic() + _ALL_STARTED_S
        while len(self._launcher.pids()) < self.world_size and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ended = self.ended_at
        self._struck.update(pid for pid in self.pids() if pid not in ended)
        self._launcher.end()

    # Looking

    @property
    def events_folder(self) -> Path:
        """Where the workers write their events."""
        return self.folder / 'events'

    def running(self) -> bool:
        """Whether the job still runs.

        Raises:
            DemoError: it was given up, with the end of the log of the last rank.
        """
        code = self._launcher.exit_status()
        if code:
            why = self._launcher.given_up or f'the job ended with exit status {code}'
            raise DemoError(f'{why}; see {self.folder}', self.tail())
        return code is None

    def pids(self) -> list[int]:
        """Of the present workers, by rank; 0 where there is none."""
        pids = self._launcher.pids()
        return [pids.get(rank, 0) for rank in range(self.world_size)]

    @property
    def ended_at(self) -> dict[int, float]:
        """When the launcher saw a process end (seconds since the epoch), by process id."""
        return {death.pid: death.time for death in self._launcher.deaths}

    @property
    def unexpected(self) -> list[Death]:
        """Workers that ended otherwise than well, but were not struck.

        Those that ended so that the launcher starts the whole job again did as they should.
        """
        return [
            death
            for death in self._launcher.deaths
            if death.code not in (0, EXIT_WHOLE_JOB) and death.pid not in self._struck
        ]

    def wait(self) -> None:
        """Wait until all of the job is gone, however it ended."""
        while self._launcher.exit_status() is None:
            time.sleep(_POLL_S)

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
        return parse_log(self.text(self.world_size - 1))

    def text(self, rank: int) -> str:
        """Everything that a rank has printed."""
        log = self._launcher.log_of(rank)
        return log.read_text('utf-8', errors='replace') if log.exists() else ''

    def iterations(self) -> list[Iteration]:
        """What the last rank has logged in all its lives, in order."""
        return self.read_log().iterations

    def events(self) -> list[dict[str, Any]]:
        """Events of all ranks so far, in the order of time."""
        return evidence.read_events(self.events_folder)

    def tail(self) -> str:
        """The last lines of the logs of all ranks."""
        lines = []
        for rank in range(self.world_size):
            lines += [f'--- rank {rank}', *self.text(rank).splitlines()[-_TAIL_LINES:]]
        return '\n'.join(lines)

    # Striking

    def ranks_of_node(self, rank: int) -> range:
        """All ranks on the node of a rank."""
        first = rank // self.workers_per_node * self.workers_per_node
        return range(first, first + self.workers_per_node)

    def strike(self, ranks: Collection[int], number: signal.Signals) -> float:
        """Send a signal to workers; returns when (seconds since the epoch)."""
        pids = self._launcher.pids()
        struck_at = time.time()
        for rank in ranks:
            if rank in pids:
                self._signal(pids[rank], number)
        return struck_at

    def strike_node(self, rank: int) -> float:
        """Kill all workers of the node of a rank and delete its memory; returns when.

        They stand still first: nobody may write what is deleted, and no successor may find it.
        """
        ranks = self.ranks_of_node(rank)
        self.strike(ranks, signal.SIGSTOP)
        assert self._memory is not None
        node = rank // self.workers_per_node
        memory = self._memory / RUN_ID / f'node{node}'
        if not memory.is_dir():
            raise DemoError(f'{memory} is missing; node {node} has no memory to lose')
        shutil.rmtree(memory)
        return self.strike(ranks, signal.SIGKILL)

    def strike_agent(self, rank: int) -> float:
        """Kill the agent of a rank with its worker, and start it again; returns when."""
        assert isinstance(self._launcher, Agents)
        self._struck.add(self.pids()[rank])
        struck_at = time.time()
        self._struck.update(self._launcher.kill_agent(rank))
        self._launcher.start_agent(rank)
        return struck_at

    def launch_again(self) -> float:
        """Kill launcher and workers, and launch the same job again; returns when."""
        self._struck.update(self._launcher.pids().values())
        struck_at = time.time()
        self._launcher.kill()
        self._launcher.start()
        return struck_at

    def stick(self, rank: int) -> float:
        """Let the loader of a worker wait for ever; returns when."""
        pid = self.pids()[rank]
        self._struck.add(pid)
        struck_at = time.time()
        (self.folder / f'{_STALL}.{pid}').touch()
        return struck_at

    def let_go(self, pid: int) -> None:
        """Let a worker run on that was only held."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _signal(self, pid: int, number: signal.Signals) -> None:
        """To a worker and all that it has started."""
        self._struck.add(pid)
        with contextlib.suppress(ProcessLookupError):  # it may have died this moment
            os.killpg(pid, number)
