# SPDX-License-Identifier: Apache-2.0
"""A training job on emulated nodes, with faults of all kinds."""

import contextlib
import enum
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from moevement_ext.config_file import SITE
from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.events import Event, WorkerStarted
from moevement_ext.launch.launch_config import StagedAction

from .digests import StateDigest, kinds_of_difference, read_digest
from .evidence import Recovery, kind_of, recovers_locally, recovery
from .following import Follower
from .launch import Death, Launch, Launcher, family
from .local_cluster import LocalCluster
from .programs import LabError
from .run_log import RunLog, parse_log
from .torchrun import Agents

_POLL_S = 0.1
_STALLED_S = 300
_STALL = 'stall'
# In the command line of its process.
_COORDINATOR = 'moevement_ext.coordinator.keeper'


class Kind(enum.StrEnum):
    """Kinds of faults."""

    KILL = 'kill'
    """SIGKILL of one worker."""
    STOP = 'stop'
    """SIGSTOP of one worker, which the others must detect as hung."""
    NODE = 'node'
    """SIGKILL of all workers of a node, whose host memory is deleted."""
    DOUBLE = 'double'
    """SIGKILL of two workers, together, or the second during the recovery from the first."""
    STUCK = 'stuck'
    """The data loader of one worker blocks forever; otherwise its process is alive."""
    WHOLE = 'whole'
    """SIGKILL of all workers; the launcher survives."""
    JOB = 'job'
    """SIGKILL of the launcher and all workers; then a new launch of the same job."""
    AGENT = 'agent'
    """SIGKILL of a node's agent and its worker; then a restart of the agent."""
    AWAY = 'away'
    """Like `NODE`, for one or more nodes, which do not come back: their ranks become guests."""
    BACK = 'back'
    """A node returns after `AWAY`, to which its ranks move."""
    COORDINATOR = 'coordinator'
    """SIGKILL of the coordinator, before that of a worker or after it."""
    STILL = 'still'
    """The same, but SIGSTOP of the coordinator."""


type Start = Launcher | Callable[[Launch], Agents]
"""The program that starts the workers, or what makes its agents."""


class Job:
    """A running job; leaving the `with` block ends all its processes. Used from one thread.

    Entering it waits for all workers, and raises `LabError` if some of them do not start.

    Args:
        launch: parameters of the job.
        launcher: what starts its workers.
        memory: host memory of the run, all nodes; without it `NODE` and `STUCK` are impossible.
    """

    def __init__(
        self, launch: Launch, launcher: Start = Launcher.LOCAL, memory: Path | None = None
    ) -> None:
        launch.folder.mkdir(parents=True)
        self.folder = launch.folder
        self._memory = memory
        self._stall = launch.folder / _STALL
        variables = dict(launch.variables)
        if memory is not None:
            variables['MOEVEMENT_STALL_FILE'] = str(self._stall)
        if launch.settings:
            variables[SITE] = str(launch.folder / 'settings.toml')
            Path(variables[SITE]).write_text(launch.settings, 'utf-8')
        self._launch = launch = launch._replace(variables=variables)
        self._launcher: LocalCluster | Agents
        if launcher is Launcher.LOCAL:
            self._launcher = LocalCluster(launch)
        else:
            make = Agents if isinstance(launcher, Launcher) else launcher
            self._launcher = make(launch)
        self._faulted: set[int] = set()
        self._events = Follower(self.folder / 'events')

    def __enter__(self) -> Self:
        self._launcher.start()
        try:
            self._await_workers()
        except BaseException:
            self._launcher.end()
            raise
        return self

    def _await_workers(self) -> None:
        """Wait until all workers have started, or the job has ended."""
        deadline, size = time.monotonic() + _STALLED_S, self._launch.world_size
        while (started := len(self._launcher.pids())) < size:
            if self._launcher.exit_status() is not None:
                return
            if time.monotonic() >= deadline:
                late = f'{started} of {size} workers have started in {_STALLED_S} s'
                raise LabError(f'{late}; see {self.folder}', self.tail())
            time.sleep(_POLL_S / 10)

    def __exit__(self, *_: object) -> None:
        ended = {death.pid for death in self._launcher.deaths}
        self._faulted.update(pid for pid in self.pids() if pid not in ended)
        self._launcher.end()

    # Progress

    def running(self) -> bool:
        """True while the job runs."""
        code = self._launcher.exit_status()
        if code:
            why = self._launcher.given_up or f'the job ended with exit status {code}'
            raise LabError(f'{why}; see {self.folder}', self.tail())
        return code is None

    def wait(self) -> None:
        while self._launcher.exit_status() is None:
            time.sleep(_POLL_S)

    def follow(self, what: str, poll_s: float = _POLL_S) -> Iterator[RunLog]:
        """Yield the log repeatedly while the job runs.

        Args:
            what: the awaited event, for the message if the job makes no progress.
            poll_s: seconds between two reads.
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

    def await_iteration(self, number: int, poll: Callable[[], object] = lambda: None) -> None:
        """Wait until an iteration is logged; raises `LabError` if the job ends first.

        `poll` is called several times a second.
        """
        for log in self.follow(f'iteration {number}'):
            poll()
            if log.iterations and log.iterations[-1].number >= number:
                return
        raise LabError(f'the job ended before iteration {number}', self.tail())

    def finish(self) -> RunLog:
        """Let the job end; returns its whole log."""
        for _ in self.follow('the end'):
            pass
        return self.read_log()

    def read_log(self) -> RunLog:
        """Log of the last rank, which logs the iterations; empty if there is no file yet."""
        log = self._launcher.log_of(self._launch.world_size - 1)
        return parse_log(log.read_text('utf-8', errors='replace') if log.exists() else '')

    def events(self) -> list[Event]:
        if (self.folder / 'events').is_dir():
            self._events.read_new()
        return self._events.events

    def tail(self) -> str:
        return self._launcher.tail()

    # Its processes

    def pids(self) -> list[int]:
        """Process ids of the present workers, by rank; 0 if missing."""
        pids = self._launcher.pids()
        return [pids.get(rank, 0) for rank in range(self._launch.world_size)]

    def launchers(self) -> list[int]:
        """Process ids of the launchers, above all other processes of the job."""
        return self._launcher.pids_of_launchers()

    @property
    def unexpected(self) -> list[Death]:
        """Workers that failed although no fault hit them.

        Leaves out workers that ended to make the launcher restart the whole job. Where any loss
        restarts the whole job, no worker survives the death of another: under torchrun all end with
        a connection error.
        """
        if not recovers_locally(self.events()):
            return []
        return [
            death
            for death in self._launcher.deaths
            if death.code not in (0, EXIT_WHOLE_JOB) and death.pid not in self._faulted
        ]

    def ranks_beside(self, rank: int) -> list[int]:
        """Ranks that are now on the node of a rank, guests included."""
        hosts = self._launcher.hosts()
        beside = [node for node in hosts if hosts[node] == hosts[self._node_of(rank)]]
        return [one for node in beside for one in self._launch.ranks_of(node)]

    # Faults

    def hurt(self, kind: Kind, victims: Sequence[int]) -> float:
        """Inject a fault; returns its time (seconds since the epoch).

        Args:
            kind: kind of the fault; `NODE` hits the node of the first victim.
            victims: ranks; of `AWAY` and `BACK` one of each node.
        """
        pid, at = self.pids()[victims[0]], time.time()
        match kind:
            case Kind.NODE:
                at = self.lose_node(victims[0])
            case Kind.STOP:
                at = self.send(victims, signal.SIGSTOP)
            case Kind.STUCK:
                self._faulted.add(pid)
                self._stall.with_name(f'{_STALL}.{pid}').touch()
            case Kind.AGENT:
                self._lose_agent(victims[0])
            case Kind.AWAY | Kind.BACK:
                self._order(kind, victims)
            case Kind.JOB:
                self.kill()
                self._launcher.start()
            case _:
                at = self.send(victims, signal.SIGKILL)
        return at

    def kill(self) -> None:
        """SIGKILL the launcher, and all workers with it."""
        self._faulted.update(self._launcher.pids().values())
        self._launcher.kill()

    def kill_after(self, iteration: int, victims: Collection[int], delay_s: float = 0.0) -> float:
        """SIGKILL ranks once an iteration is logged; returns the time (seconds since the epoch)."""
        self.await_iteration(iteration)
        time.sleep(delay_s)  # the moment of the fault, not a synchronisation
        return self.send(victims, signal.SIGKILL)

    def send(self, ranks: Collection[int], number: signal.Signals) -> float:
        """Signal workers and their descendants; returns the time (seconds since the epoch)."""
        pids = self._launcher.pids()
        signalled_at = time.time()
        for pid in (pids[rank] for rank in ranks if rank in pids):
            self._faulted.add(pid)
            with contextlib.suppress(ProcessLookupError):  # it may have just died
                os.killpg(pid, number)
        return signalled_at

    def signal_coordinator(self, number: signal.Signals) -> None:
        """Signal the coordinator, if there is one now."""
        for process in family([psutil.Process(pid) for pid in self.launchers()]):
            with contextlib.suppress(psutil.NoSuchProcess):
                if _COORDINATOR in process.cmdline():
                    process.send_signal(number)

    def lose_node(self, rank: int) -> float:
        """Kill all workers on the node of a rank and delete the node's memory; returns the time.

        The workers are stopped first: none may write deleted files, and no successor may find them.
        """
        ranks, node = self.ranks_beside(rank), self._launcher.hosts()[self._node_of(rank)]
        if self._memory is None or not (memory := self._memory / node).is_dir():
            raise LabError(f'{node} has no memory to lose in {self._memory}')
        self.send(ranks, signal.SIGSTOP)
        shutil.rmtree(memory)
        return self.send(ranks, signal.SIGKILL)

    def _order(self, kind: Kind, victims: Iterable[int]) -> None:
        if not isinstance(self._launcher, LocalCluster):
            raise LabError('only a job under `moevement launch` can do without nodes')
        action = StagedAction.LOSE_NODE
        if kind is Kind.BACK:
            action = StagedAction.RETURN_NODE
        else:
            pids = self.pids()
            lost = (one for victim in victims for one in self.ranks_beside(victim))
            self._faulted.update(pids[one] for one in lost)
        self._launcher.order(action, map(self._node_of, victims))

    def _lose_agent(self, rank: int) -> None:
        """Kill the agent of a rank with its workers, and restart it."""
        if not isinstance(self._launcher, Agents):
            raise LabError('only a job under torchrun has agents to lose')
        self._faulted.update(self.pids()[one] for one in self.ranks_beside(rank))
        self._launcher.kill(self._node_of(rank))
        self._launcher.start_agent(self._node_of(rank))

    def _node_of(self, rank: int) -> int:
        return rank // self._launch.workers_per_node


@contextlib.contextmanager
def memory_directory(
    prefix: str = 'moevement-bench-', shm: Path = Path('/dev/shm')
) -> Iterator[Path]:
    """Yield a new directory in a tmpfs, deleted afterwards."""
    if not shm.is_dir():
        raise LabError(f'{shm} is missing; windows are kept in this tmpfs of Linux')
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=shm, ignore_cleanup_errors=True
    ) as directory:
        yield Path(directory)


DIGEST = 'digest.json'


class Trained(NamedTuple):
    """A finished job."""

    log: RunLog
    state: StateDigest
    events: list[Event]
    hurt_at: float | None = None
    """Time of the last fault (seconds since the epoch), if any."""
    recovery: Recovery | None = None

    def different(self, reference: 'Trained') -> list[str]:
        return kinds_of_difference(reference.state, self.state)


def train(
    launch: Launch,
    hurt: Callable[[Job], float | None] | None = None,
    launcher: Start = Launcher.LOCAL,
    memory: Path | None = None,
) -> Trained:
    """Run a job to its end.

    Args:
        launch: parameters of the job; the flag for the digest is added.
        hurt: called after the start; returns the time of the last fault.
        launcher: what starts the workers.
        memory: host memory of the run, all nodes; required for faults that lose memory.
    """
    digest = launch.folder / DIGEST
    flags = [*launch.flags, '--sparse-ckpt-digest', str(digest)]
    with Job(launch._replace(flags=flags), launcher, memory) as job:
        hurt_at = None if hurt is None else hurt(job)
        log, events = job.finish(), job.events()
        found = None
        if hurt_at is not None:
            found = recovery(events, newest_pids(events), hurt_at, log.iterations)
    return Trained(log, read_digest(digest), events, hurt_at, found)


def newest_pids(events: Iterable[Event]) -> list[int]:
    """Process id of each rank's last worker; torchrun's agents know only running workers."""
    pids = {event.rank: event.pid for event in kind_of(events, WorkerStarted)}
    return [pid for _, pid in sorted(pids.items())]
