# SPDX-License-Identifier: Apache-2.0
"""A job whose processes are threads: real recovery and stores, fake trainer and process groups.

With its thread end the connections, servers and log of a process; its windows and ledger stay.
"""

import ctypes
import functools
import logging
import operator
import os
import queue
import shutil
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import pytest
from torch.distributed import Store, TCPStore

from moevement_ext import faults
from moevement_ext.config import CHECKFREQ, SparseCheckpointConfig, node_name
from moevement_ext.errors import EXIT_WHOLE_JOB, SparseCheckpointError
from moevement_ext.events import (
    Event,
    EventLog,
    Recovered,
    RecoveryStarted,
    WindowOnDisk,
    WindowPersisted,
)
from moevement_ext.faults import Phase
from moevement_ext.job import modes
from moevement_ext.job.job import Job
from moevement_ext.membership import exchange, membership
from moevement_ext.membership.exchange import Exchange
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.rendezvous import (
    Rendezvous,
    announce_failure,
    end_round,
    present_round,
)
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.name import RankIdentity, WindowName
from moevement_ext.plan.strategy.choice import only_source
from moevement_ext.protect import persistence
from moevement_ext.protect.persistence import WindowTracker
from moevement_ext.recover.inventory import replacement_report
from moevement_ext.replicate import node_plan
from tests.unit.coordinator.served import KeptHere
from tests.unit.memory.samples import tmpfs_directory
from tests.unit.recover.fake_groups import FakeGroups, Network
from tests.unit.recover.fake_trainer import FakeTrainer

OF_THREADS = [
    pytest.mark.usefixtures('threads_are_processes'),
    # A thread of a dead one may look at it once more, as none of a dead process does.
    pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning'),
]
"""Marks of tests of such a job."""
STAGES = 3
WINDOW = 3
Expected = dict[tuple[int, int], object]
"""State of a rank after an iteration, by rank and iteration."""
_TIMEOUT = timedelta(seconds=120)
_HANG_S = 60.0
_LONG_S = 1000.0
_PERSISTED_S = 20.0  # for a window to be persisted
SECRET = 'of the launcher, 32 letters long'
"""What the launcher of a job gives to its processes."""


class Fault(NamedTuple):
    rank: int
    phase: Phase
    iteration: int = 0
    """In which, or in the first one after it that comes there."""
    all_die: bool = False
    node_lost: bool = False
    """The memory of its node goes, too."""
    kills: int | None = None
    """Not it dies, but this rank; it goes on when all ranks have met, or it is to leave."""


class Died(SystemExit):
    """The end of a process, by a fault or by itself; threads end with it without a word."""


class StoreExchange(Exchange):
    """Gathers in the store, where values stay for joining processes."""

    def __init__(self, rank: int, archive: Store, joining: bool) -> None:
        super().__init__(archive, joining)
        self._rank = rank
        self._store = archive

    def __call__(self, name: str, own: bytes) -> list[bytes]:
        return self.among(name, own, range(STAGES), None)

    def among(self, name: str, own: bytes, ranks: Sequence[int], group: Any) -> list[bytes]:
        if not self.joining:
            exchange.leave(self._store, name, self._rank, own)
        return exchange.left_by_all(self._store, name, ranks)


def stage_of_its_own(rank: int, groups: FakeGroups) -> FakeTrainer:
    return FakeTrainer([f'{rank}.{name}' for name in 'abcd'], rank, STAGES, groups)


class Process:
    """One rank, from its start to its end; all its threads know it."""

    def __init__(self, job: 'ThreadedJob', rank: int) -> None:
        self.job = job
        self.rank = rank
        self.node = f'node{rank}'
        self.iteration = 0
        self.dead = self.finished = False
        self.fault: Fault | None = None
        self.error: BaseException | None = None
        self.code = 0
        self.ready = threading.Event()
        """It is set up, or has ended."""
        self.groups = FakeGroups(rank, STAGES, job.network, self.raise_if_dead)
        self.membership: Membership | None = None
        self.protected: Job | None = None
        self.thread = threading.Thread(target=self._run, name=f'rank {rank}', daemon=True)
        self.thread.process = self  # type: ignore[attr-defined]
        self.thread.start()

    # Its end

    def raise_if_dead(self) -> None:
        if self.dead:
            raise Died

    def end(self, code: int) -> NoReturn:
        self.code, self.dead = code, True
        raise Died

    def point(self, phase: Phase) -> None:
        self.raise_if_dead()
        fault = self.job.strikes(self, phase)
        if fault is not None and fault.kills is not None:
            assert self.membership is not None
            round = self.membership._joined.result.round
            self.job.kill(fault)
            self.await_rendezvous_after(round)
        elif fault is not None:
            self.fault, self.dead = fault, True
            raise Died

    def kill(self) -> None:
        """From outside, wherever it is but in its set-up: a thread cannot give up half of that."""
        if self.protected is not None:
            self.ready.wait(_TIMEOUT.total_seconds())
        self.dead = True
        self.groups.unblock()
        if self.membership is not None and self.membership._newest is not None:  # it has met
            self.membership._joined.watch.stop()
            self.membership._wake()  # it may wait for one that waits for its end
        _raise_in(self.thread, Died)

    def await_rendezvous_after(self, round: int) -> None:
        """Of all that live, the new one among them, unless this one has to leave for it."""
        member, deadline = self.membership, time.monotonic() + _TIMEOUT.total_seconds()
        assert member is not None
        while member._joined.result.round == round and not member.broken:
            self.raise_if_dead()
            assert time.monotonic() < deadline, 'no rank has arrived'
            time.sleep(0.002)

    def release(self) -> None:
        """What ends with a process. Called once its thread has ended."""
        if self.membership is not None and self.membership._newest is not None:  # it has met
            self.membership._joined.watch.stop()
            self.membership._loss.close()
        protected, self.protected = self.protected, None
        if protected is not None and protected.protection is not None:
            protected.protection.stop()
        if protected is not None and protected.reserved is not None:
            protected.reserved.close(remove=False)
        if protected is not None and protected._disk is not None:
            protected._disk.close()

    # Its attempt

    def _run(self) -> None:
        try:
            self._train()
        except Died:
            self.dead = True
        except BaseException as error:
            self.dead, self.error = True, error
        finally:
            self.ready.set()
            self.job.ended.put(self)

    def _train(self) -> None:
        config = SparseCheckpointConfig(**self.job.settings)
        identity = RankIdentity('run', f'pp{STAGES}', self.rank)
        brought = functools.partial(
            replacement_report,
            NodeStore(self.job.directory, 'run', node_name()),
            identity,
            only_source(config, 'run', self.rank),
        )
        place = Rendezvous(self.job.connect(), self.rank, STAGES)
        member = Membership.join(place, _TIMEOUT, _HANG_S, brought)
        self.membership = member
        if not member.joining:
            self.groups.connect(f'attempt {member.origin}')
        events = EventLog(None, self.rank)
        events.listeners.append(self._note)
        gathered = StoreExchange(self.rank, member.archive, member.joining)
        rank = Rank(identity, STAGES, 'run', 'gloo', config, events, gathered)
        job = self.protected = Job(rank, member)
        job.set_up(self._build, lambda: None, last_iteration=self.job.iterations)
        self.ready.set()
        job.train(functools.partial(self._loop, job))
        try:
            member.barrier('trained')
        except SparseCheckpointError:
            job.failed()
            raise
        self.protected = None
        job.close()
        self.finished = True

    def _build(self, with_dense: bool) -> FakeTrainer:
        self.trainer = self.job.trainer(self.rank, self.groups)
        self.trainer.last_iteration = self.job.iterations
        return self.trainer

    def _loop(self, job: Job) -> None:
        trainer = self.trainer
        while trainer.iteration < self.job.iterations:
            self._await_window(trainer.iteration)
            job.step(trainer.iteration)
            self.job.note(self.rank, trainer)
            trainer.loop.evaluate()

    def _note(self, event: Event) -> None:
        self.job.events.append(event)
        if isinstance(event, (self.job.kept, RecoveryStarted)):
            self.job.persisted = max(self.job.persisted, event.start)
        self.job.histories |= {event.plan[:16]} if isinstance(event, WindowPersisted) else set()
        if isinstance(event, RecoveryStarted):
            self.job.began.append(self.rank)

    def _await_window(self, iteration: int) -> None:
        """The newest that can be persisted is, so that the next failure recovers from that."""
        assert self.membership is not None
        due = iteration - 2 * WINDOW + 1  # whose last slot is sealed, wherever windows begin
        deadline = time.monotonic() + _PERSISTED_S
        while self.job.persisted < due and time.monotonic() < deadline:
            self.raise_if_dead()
            if self.membership.broken or (
                self.protected and _comes_later(self.protected, due, self.job.period)
            ):
                return
            time.sleep(0.002)


def _comes_later(job: Job, due: int, period: int) -> bool:
    """True if the window that begins at `due`, or soon after, is not persisted before a step."""
    protection = job.protection
    assert protection is not None
    # A dead one may have reported it not, and the next step does; or a recovery is judged before.
    if job._mode.recovery.pending() or protection.checkpointer.schedule.origin > due:
        return True
    # A busy machine that holds a slot up gives a window up.
    starts, disk = range(due, due + period), protection._disk
    if any(protection.memory.windows.is_given_up(WindowName(start, '')) for start in starts):
        return True
    newest = [] if disk is None else [name for name in (disk._tried, disk._offered) if name]
    return any(disk._agreed.is_given_up(name.start) for name in newest if name.start >= due)


class ThreadedJob:
    """Launches the processes, and others in the place of those that die.

    The faults of `schedule` strike one after the other: the next is armed when one has struck.
    States are compared with those `expected` of a fault-free run. Processes that end by an error
    are replaced `most_errors` times; the next one ends the job.
    """

    def __init__(
        self,
        directory: Path,
        iterations: int,
        schedule: Sequence[Fault] = (),
        expected: Expected | None = None,
        most_errors: int = 0,
        trainer: Callable[[int, FakeGroups], FakeTrainer] = stage_of_its_own,
        **settings: Any,
    ) -> None:
        self.settings = {'dir': str(directory), 'run_id': 'run', 'interface': 'lo', 'max_wait': 3.0}
        if 'strategy' not in settings:
            self.settings |= {'window': WINDOW, 'replicas': 1, 'log_lag': 4.0}
        self.settings |= settings
        self.period = settings.get('interval', WINDOW)
        """Iterations from the start of a window to the start of the next."""
        on_disk = settings.get('strategy') == CHECKFREQ
        self.kept: type[Event] = WindowOnDisk if on_disk else WindowPersisted
        """The event after which a window is recovered from."""
        self.trainer = trainer
        self.directory = directory
        self.most_errors = most_errors
        self.errors: list[tuple[int, BaseException]] = []  # with the rank
        self.iterations = iterations
        self.schedule = deque(schedule)
        self.expected = expected
        self.states: Expected = {}
        self.events: list[Event] = []
        self.began: list[int] = []
        """Rank of each replay that began, again ones among them."""
        self.evaluations: list[int] = []
        """By rank, as it counts them at the end."""
        self.restarts = 0  # of all processes
        self.persisted, self.histories = -1, set[str]()
        self.network = Network()
        self.ended: queue.Queue[Process] = queue.Queue()
        self._lock = threading.Lock()
        self._store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)

    @property
    def recovered(self) -> list[Recovered]:
        return [event for event in self.events if isinstance(event, Recovered)]

    def connect(self) -> Store:
        return TCPStore('127.0.0.1', self._store.port, is_master=False, timeout=_TIMEOUT)

    def strikes(self, process: Process, phase: Phase) -> Fault | None:
        """The fault that ends `process` here, if there is one."""
        with self._lock:
            if not self.schedule:
                return None
            fault = self.schedule[0]
            here = fault.rank == process.rank and fault.phase is phase
            if not here or process.iteration < fault.iteration:
                return None
            return self.schedule.popleft()

    def note(self, rank: int, trainer: FakeTrainer) -> None:
        key, state = (rank, trainer.iteration), trainer.everything()
        self.states[key] = state
        if self.expected is not None:
            place = f'rank {rank} after iteration {trainer.iteration}'
            assert state == self.expected[key], f'differing: {place}'

    def run(self) -> None:
        running = self._running = {rank: Process(self, rank) for rank in range(STAGES)}
        try:
            while not all(process.finished for process in running.values()):
                process = self.ended.get(timeout=_TIMEOUT.total_seconds())
                if process is not running[process.rank] or process.finished:
                    continue  # of an attempt of the job that is over
                if process.error is not None:
                    self.errors.append((process.rank, process.error))
                    if len(self.errors) > self.most_errors:
                        raise process.error
                if process.code == EXIT_WHOLE_JOB or (process.fault and process.fault.all_die):
                    running = self._running = self._start_all_again(running, process)
                else:
                    running[process.rank] = self._replace(process)
        finally:
            self._kill({rank: it for rank, it in running.items() if not it.finished})
        self.evaluations = [process.trainer.loop.evaluations for process in running.values()]

    def kill(self, fault: Fault) -> None:
        """From outside; all waits in which it may be end. Any thread but its own."""
        rank = fault.kills
        assert rank is not None
        self._running[rank].fault = fault
        self._running[rank].kill()
        announce_failure(self._store.clone(), rank, f'rank {rank} was killed')

    def _replace(self, process: Process) -> Process:
        self._reap(process)
        announce_failure(self._store, process.rank, f'rank {process.rank} died')
        return Process(self, process.rank)

    def _start_all_again(self, running: dict[int, Process], first: Process) -> dict[int, Process]:
        self.restarts += 1
        self._kill(running)
        self._reap(first)
        return {rank: Process(self, rank) for rank in range(STAGES)}

    def _reap(self, process: Process) -> None:
        process.release()
        if process.fault is not None and process.fault.node_lost:
            shutil.rmtree(self.directory / 'run' / process.node)

    def _kill(self, running: dict[int, Process]) -> None:
        for process in running.values():
            process.kill()
        end_round(self._store, present_round(self._store), 'all were killed')
        for process in running.values():
            process.thread.join()
            process.release()


def train(
    iterations: int,
    schedule: Sequence[Fault] = (),
    expected: Expected | None = None,
    kind: type[ThreadedJob] = ThreadedJob,
    **given: Any,
) -> ThreadedJob:
    """A job to its end, with all that was to happen to it."""
    with tmpfs_directory() as directory:
        job = kind(directory, iterations, schedule, expected, **given)
        job.run()
    assert not job.schedule, 'not all faults have struck'
    assert {rank for rank, iteration in job.states if iteration == iterations} == {*range(STAGES)}
    return job


class _Condition(threading.Condition):
    """Taken and given back in one step each: a thread that is to end does not do so in between."""

    __enter__ = property(operator.attrgetter('_lock.__enter__'))
    __exit__ = property(operator.attrgetter('_lock.__exit__'))


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Have another thread raise, but not while it logs, or wakes a thread.

    It would keep a lock of `logging`, or `Condition` would wake a thread again that has woken.
    """
    ident = ctypes.c_ulong(thread.ident or 0)
    while thread.is_alive():
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(_LONG_S)  # it stays where it is looked at
        try:
            if not _logs_or_wakes(sys._current_frames().get(ident.value)):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(error))
                return
        finally:
            sys.setswitchinterval(switch_s)
        time.sleep(0.001)


def _logs_or_wakes(frame: FrameType | None) -> bool:
    while frame and frame.f_code.co_filename != logging.__file__:
        if frame.f_code.co_name in ('put', 'notify'):
            break
        frame = frame.f_back
    return frame is not None


def spy(
    patches: pytest.MonkeyPatch,
    kind: type,
    method: str,
    note: Callable[..., object],
    after: bool = False,
) -> None:
    """Have `note` called with what each call of a method is given, before it or after it."""
    original = getattr(kind, method)

    def noted(*given: Any, **named: Any) -> Any:
        if not after:
            note(*given)
        result = original(*given, **named)
        if after:
            note(*given)
        return result

    patches.setattr(kind, method, noted)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have threads be processes: each knows its own, with its node, faults and groups."""
    _end_threads_alone()

    def point(phase: Phase) -> None:
        process = _present()
        if process is not None:
            process.point(phase)

    def at_iteration(iteration: int) -> None:
        process = _present()
        if process is not None:
            process.iteration = iteration

    host = socket.gethostname()

    def name() -> str:
        process = _present()
        return host if process is None else process.node

    def groups(backend: str, timeout: timedelta) -> FakeGroups:
        process = _present()
        assert process is not None
        return process.groups

    monkeypatch.delenv('MOEVEMENT_NODE', raising=False)
    monkeypatch.setenv('MOEVEMENT_SECRET', SECRET)
    monkeypatch.setattr(threading, 'Condition', _Condition)
    # All processes share one heap: collecting it at each start would be a third of all CPU time.
    monkeypatch.setattr(modes, 'settled', nullcontext)
    monkeypatch.setattr(faults, 'point', point)
    monkeypatch.setattr(faults, 'at_iteration', at_iteration)
    monkeypatch.setattr(socket, 'gethostname', name)
    monkeypatch.setattr(membership, 'ProcessGroups', groups)
    monkeypatch.setattr(node_plan, 'host_identity', lambda: host)
    monkeypatch.setattr(persistence, 'Keeper', KeptHere)
    _guard_rounds(monkeypatch)


def _guard_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank reports its windows, or takes a promise back, while it may hear of agreements."""

    def joins(place: Rendezvous, *_: object) -> None:
        process = _present()
        protection = process and process.protected and process.protected.protection
        assert protection is None or protection.persistence._round is None, place.rank

    def withdraws(tracker: WindowTracker, window: WindowName | None = None) -> None:
        kept = window or tracker.agreed.persisted
        start = -1 if kept is None else kept.start
        taken_back = [one for one in tracker.promises.windows if one.start > start]
        assert not taken_back or tracker._persistence._round is None, taken_back

    spy(monkeypatch, Rendezvous, '_join', joins)
    spy(monkeypatch, WindowTracker, 'withdraw_after', withdraws)
    spy(monkeypatch, WindowTracker, 'withdraw_unpersisted', withdraws)


@functools.cache
def _end_threads_alone() -> None:
    """For good: some thread of a job may outlive its test, and would end pytest without a word."""
    leave, start = os._exit, threading.Thread.start

    def end(code: int) -> NoReturn:
        process = _present()
        if process is None:
            leave(code)
        process.end(code)

    def start_in_process(thread: threading.Thread) -> None:
        if not hasattr(thread, 'process'):
            thread.process = _present()  # type: ignore[attr-defined]
        start(thread)

    os._exit = end
    threading.Thread.start = start_in_process  # type: ignore[method-assign]


def _present() -> Process | None:
    return getattr(threading.current_thread(), 'process', None)
