# SPDX-License-Identifier: Apache-2.0
"""Starts the workers of all emulated nodes, and in place of one that dies another: only that one.

torchrun restarts all workers of the agent whose worker died. Here the others live on: the failure
is announced to them in the launcher's store, which outlives them all, and a hot spare or a new
process takes the place of the dead one. So it is for a program that says that its workers survive
(see `statements`); the workers of any other are all started again together, as torchrun does.
"""

import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from torch.distributed import DistError, TCPStore

from moevement_ext.config import ConfigurationError, SparseCheckpointConfig
from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.local_cluster.child import Child
from moevement_ext.local_cluster.config import Action, LaunchConfig, StagedFault
from moevement_ext.local_cluster.errors import LaunchError
from moevement_ext.local_cluster.events import (
    AllStartAgain,
    Event,
    FaultStaged,
    JobFailed,
    MemoryKept,
    WorkerEnded,
    WorkerEvicted,
    WorkerLostAtExit,
    WorkerStarted,
    WorkerStopped,
    describe_exit,
)
from moevement_ext.local_cluster.loop import Loop
from moevement_ext.local_cluster.output import LogTail, Relay, last_lines
from moevement_ext.local_cluster.staged_faults import StagedFaults
from moevement_ext.local_cluster.starter import LocalStarter, Starter
from moevement_ext.local_cluster.statements import told_finished, told_memory, told_survivors
from moevement_ext.membership.eviction import evictions, take_eviction
from moevement_ext.membership.rendezvous import announce_failure
from moevement_ext.store import outside

_POLL_S = 0.1
_STORE_TIMEOUT = timedelta(seconds=60)
_GLANCE = timedelta(seconds=1)
_MAX_ERRORS = 3
_ERRORS_WITHIN_S = 600.0


@dataclass
class Worker:
    """The present process of a rank."""

    rank: int
    child: Child
    relay: Relay | None
    restarts: int = 0
    finished: bool = False
    """It ended with exit status 0, or with what it had announced."""
    errors: list[float] = field(default_factory=list)
    """When the program itself gave up (seconds of the monotonic clock)."""

    @property
    def pid(self) -> int:
        """Process id of the present life."""
        return self.child.pid


def print_event(event: Event) -> None:
    """Tell the person who waits."""
    print(f'[launcher] {event}', file=sys.stderr, flush=True)


class Supervisor:
    """One job. `run` does everything, on one thread; other threads may look, and call `stop`.

    Args:
        config: of the job.
        on_event: called by the thread that runs `run` with everything that happens, right away;
            by default it is printed on stderr.
        starter: makes what starts the workers; by default they are processes of this machine.

    Attributes:
        store: where the workers meet; it outlives them. That of `--sparse-ckpt-store` if the
            program has this flag: if it is lost, the workers leave, and all start again in the
            one that is there then.
        workers: by rank, while `run` runs and afterwards.

    Raises:
        ConfigurationError: a staged failure or the GPUs of this machine do not fit the job, or
            the outside store is not reached.
    """

    def __init__(
        self,
        config: LaunchConfig,
        on_event: Callable[[Event], None] = print_event,
        starter: Callable[[LaunchConfig, Loop, Callable[[Event], None]], Starter] = LocalStarter,
    ) -> None:
        self.config = config
        self._loop = Loop()
        self._starter = starter(config, self._loop, on_event)
        self._open_store()
        self.workers: list[Worker] = []
        self._report = on_event
        self._faults = StagedFaults(config)
        self._exit_code: int | None = None
        self._announced_code = 0
        self._restarts = 0

    def _open_store(self, to_connect: timedelta = _STORE_TIMEOUT) -> None:
        self._evictions = 0  # as that store counts them
        address = outside.given(self.config.flags)
        if address is not None:
            host, port = SparseCheckpointConfig(store=address).store_address
            self.store = outside.connect(host, port, to_connect)
            self.store.set_timeout(_STORE_TIMEOUT)
            return
        self.store = TCPStore(
            '127.0.0.1', 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT
        )

    def run(self) -> int:
        """Start the workers and wait until all have ended well; nothing of the job is left then.

        All processes are killed when the calling thread ends, whatever ends it.

        Returns:
            0, or the exit status that the workers had announced; that of the `LaunchError` if the
            job was given up; what `stop` was given if that was called.
        """
        if self.config.log_dir is not None:
            self.config.log_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._supervise()
        except LaunchError as failure:
            self._report(JobFailed(str(failure)))
            return failure.exit_code
        finally:
            self._kill_all()
            self._report_memory()
        return self._exit_code or self._announced_code

    def stop(self, exit_code: int) -> None:
        """End all workers, with SIGTERM at first, and let `run` return `exit_code`; any thread."""
        self._exit_code = exit_code

    def _supervise(self) -> None:
        tail = self._log_tail()
        self._starter.open(self.store.port)
        for rank in range(self.config.world_size):
            child, was_spare = self._starter.start(rank, 0)
            self.workers.append(Worker(rank, child, self._relay(rank, child)))
            self._started(self.workers[rank], was_spare)
        self._starter.keep_spares()
        next_poll = time.monotonic()
        while not all(worker.finished for worker in self.workers):
            self._loop.turn(_POLL_S)
            if self._exit_code is not None:
                return self._terminate()
            if time.monotonic() >= next_poll:
                next_poll = time.monotonic() + _POLL_S
                self._starter.look()
                self._look_into_store()
                if tail is not None:
                    tail.pump()

    # Lives of a worker

    def _relay(self, rank: int, child: Child) -> Relay | None:
        if child.output is None:
            return None
        is_last = rank == self.config.world_size - 1
        return Relay(child.output, f'[rank {rank}] ', self._stage_faults if is_last else _ignore)

    def _started(self, worker: Worker, was_spare: bool) -> None:
        if worker.relay is not None:
            self._loop.watch(worker.relay.fd, partial(self._pump, worker.relay))
        self._loop.watch(worker.child.death, partial(self._ended, worker))
        if worker.pid:  # else it is reported once it is known
            self._report(WorkerStarted(worker.rank, worker.pid, worker.restarts, was_spare))

    def _ended(self, worker: Worker) -> None:
        code = self._reap(worker)
        if code == 0:
            return
        try:
            self._judge(worker, code)
        except DistError:  # an outside store: the connection is lost, or all that was in it
            self._open_store()
            self._judge(worker, code)

    def _judge(self, worker: Worker, code: int) -> None:
        how = f'rank {worker.rank} (pid {worker.pid}) {describe_exit(code)}'
        announced = told_finished(self.store, worker.rank, worker.pid)
        if announced is not None:
            self._ended_when_done(worker, code, announced, how)
            return
        if code not in (EXIT_WHOLE_JOB, -signal.SIGKILL, -signal.SIGTERM):
            worker.errors.append(time.monotonic())
        if told_survivors(self.store):
            self._replace(worker, how)
        else:
            self._start_all_again(worker, how)

    def _ended_when_done(self, worker: Worker, code: int, announced: int, how: str) -> None:
        """All its work was done: nobody waits for it, so it is not replaced."""
        if code >= 0 and code != announced:
            raise LaunchError(f'{how} when it had finished{self._last_words(worker)}')
        if code < 0:
            self._report(WorkerLostAtExit(worker.rank, worker.pid, code))
        worker.finished = True
        self._announced_code = max(self._announced_code, announced)

    def _reap(self, worker: Worker) -> int:
        code = self._bury(worker)
        self._report(WorkerEnded(worker.rank, worker.pid, code))
        return code

    def _bury(self, worker: Worker) -> int:
        """Wait for its end; returns how it ended."""
        self._loop.forget(worker.child.death)
        code = worker.child.reap()
        if worker.relay is not None:
            self._loop.forget(worker.relay.fd)
            worker.relay.finish()
        worker.child.close()
        worker.finished = code == 0
        return code

    def _replace(self, worker: Worker, how: str) -> None:
        announce_failure(self.store, worker.rank, how)
        self._refuse_in_vain(worker, how, worker.errors)
        self._start_again(worker, worker.restarts + 1)

    def _start_all_again(self, worker: Worker, how: str) -> None:
        """The others wait for the dead worker, perhaps for ever, and nothing can wake them up."""
        self._look_into_store()  # one that ended because of a hung one asked for this first
        self._stop(self._living())
        errors = [at for any_worker in self.workers for at in any_worker.errors]
        self._refuse_in_vain(worker, how, errors)
        self._report(AllStartAgain(how))
        # torch would find the keys of the life before in the old one, and wait for the dead.
        self._open_store()
        self._starter.open(self.store.port)
        restarts = 1 + max(any_worker.restarts for any_worker in self.workers)
        for any_worker in self.workers:
            self._start_again(any_worker, restarts)
        self._starter.keep_spares()

    def _stop(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.child.signal(signal.SIGKILL)
        for worker in workers:
            code = self._bury(worker)
            by_itself = code != -signal.SIGKILL
            ended = WorkerEnded(worker.rank, worker.pid, code)
            self._report(ended if by_itself else WorkerStopped(worker.rank, worker.pid))

    def _start_again(self, worker: Worker, restarts: int) -> None:
        worker.restarts = restarts
        worker.child, was_spare = self._starter.start(worker.rank, restarts)
        worker.relay = self._relay(worker.rank, worker.child)
        self._started(worker, was_spare)

    def _refuse_in_vain(self, worker: Worker, how: str, errors: list[float]) -> None:
        """Count a replacement, if one may be and is worth being started.

        Raises:
            LaunchError: it is not.
        """
        done = [other.rank for other in self.workers if self._is_done(other)]
        if done:
            raise LaunchError(
                f'{how} when rank {done[0]} had already finished: '
                'a replacement would wait in vain for its peers.'
            )
        recent = [at for at in errors if at > time.monotonic() - _ERRORS_WITHIN_S]
        if len(recent) >= _MAX_ERRORS:
            raise LaunchError(
                f'{how}; it failed by itself {len(recent)} times within '
                f'{_ERRORS_WITHIN_S / 60:.0f} minutes{self._last_words(worker)}'
            )
        if self._restarts >= self.config.max_restarts:
            raise LaunchError(f'{how} and --max-restarts {self.config.max_restarts} is used up.')
        self._restarts += 1

    def _is_done(self, worker: Worker) -> bool:
        return worker.finished or told_finished(self.store, worker.rank, worker.pid) is not None

    def _last_words(self, worker: Worker) -> str:
        """What a dead worker printed last, to be shown after the reason of a failure."""
        log = self.config.log_of(worker.rank)
        lines = worker.child.last_lines if worker.relay is None else worker.relay.last_lines
        if log is not None:
            lines = last_lines(log)
        if not lines:
            return '; it printed nothing.'
        return '; its last lines:\n' + '\n'.join(f'    {line}' for line in lines)

    def _pump(self, relay: Relay) -> None:
        if not relay.pump():
            self._loop.forget(relay.fd)

    # The end

    def _terminate(self) -> None:
        """Ask all workers to end, and wait for them a while."""
        for worker in self._living():
            # Nobody is replaced any more.
            self._loop.watch(worker.child.death, partial(self._reap, worker))
            worker.child.signal(signal.SIGTERM)
            worker.child.signal(signal.SIGCONT)  # for one that is stopped
        deadline = time.monotonic() + self.config.grace_s
        while self._living() and time.monotonic() < deadline:
            self._loop.turn(_POLL_S)

    def _kill_all(self) -> None:
        for worker in self._living():
            worker.child.signal(signal.SIGKILL)
        for worker in self._living():
            self._reap(worker)
        self._starter.close()
        self._loop.close()

    def _report_memory(self) -> None:
        """Say what a job that did not finish left behind."""
        try:
            memory = told_memory(self.store)
        except DistError:
            return
        if memory is not None and memory.exists():
            self._report(MemoryKept(memory))

    def _living(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.child.ended]

    # Killed on purpose

    def _look_into_store(self) -> None:
        try:
            self._evict()
        except DistError:
            with suppress(ConfigurationError):  # tried again
                self._open_store(_GLANCE)

    def _evict(self) -> None:
        """Kill the workers that the others found hung."""
        asked = evictions(self.store)
        if asked == self._evictions:
            return
        for worker in self._living():
            # An order about an earlier process of the rank came too late.
            if take_eviction(self.store, worker.rank) == worker.pid:
                worker.child.signal(signal.SIGKILL)
                self._report(WorkerEvicted(worker.rank, worker.pid))
        self._evictions = asked

    def _log_tail(self) -> LogTail | None:
        log = self.config.log_of(self.config.world_size - 1)
        return (
            LogTail(log, self._stage_faults) if log is not None and self._faults.pending else None
        )

    def _stage_faults(self, line: str) -> None:
        """Stage the failures that are due once the last rank has logged this line."""
        for fault in self._faults.due(line):
            if fault.action is Action.KILL_NODE:
                self._kill_node(fault)
            else:
                stop = fault.action is Action.STOP
                number = signal.SIGSTOP if stop else signal.SIGKILL
                self.workers[fault.target].child.signal(number)
                self._report(FaultStaged(fault))

    def _kill_node(self, fault: StagedFault) -> None:
        ranks = self.config.ranks_of(fault.target)
        living = [self.workers[rank].child for rank in ranks if not self.workers[rank].child.ended]
        deleted = self._starter.lose_node(fault.target, living, self._faults.memory_of)
        self._report(FaultStaged(fault, deleted))


def _ignore(line: str) -> None:
    """Only the log of the last rank tells how far the job is."""
