# SPDX-License-Identifier: Apache-2.0
"""Starts all workers of a job, and replaces a dead worker while the others keep running.

torchrun restarts all workers of the agent whose worker died. Here the launcher announces the
failure in its store, which outlives all workers, and a hot spare or a new process replaces the dead
worker. This requires a program that reports that its workers survive (see `mailbox`); the
workers of any other program restart together, as under torchrun.
"""

import math
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch.distributed import DistError, TCPStore

from moevement_ext import store as outside
from moevement_ext.config import ConfigurationError
from moevement_ext.config_file import value_of
from moevement_ext.errors import EXIT_USER_ERROR, EXIT_WHOLE_JOB, LaunchError
from moevement_ext.events import Event
from moevement_ext.launch.child import FdLoop
from moevement_ext.launch.launch_config import (
    STORE_FLAG,
    LaunchConfig,
    StagedAction,
    StagedFault,
    store_address,
    unnamed_run_id,
)
from moevement_ext.launch.launcher_events import (
    AllStartAgain,
    FaultStaged,
    JobFailed,
    Journal,
    MemoryKept,
    StoreFound,
    StoreGone,
    WorkerEnded,
    WorkerLate,
    WorkerStopped,
    WorkerUnkillable,
)
from moevement_ext.launch.local import LocalStarter
from moevement_ext.launch.output import LogTail
from moevement_ext.launch.remote import Starter
from moevement_ext.launch.staged_faults import StagedFaults, logged_iteration
from moevement_ext.launch.worker import (
    BadEnd,
    Outcome,
    Worker,
    late_workers,
    print_event,
    refuse_mistakes,
    refuse_useless,
)
from moevement_ext.membership.mailbox import (
    of_launch,
    read_files,
    read_finished,
    read_memory,
    read_survivors,
)
from moevement_ext.membership.rendezvous import announce_failure, present_round
from moevement_ext.memory.node_store import holds_windows, is_in_use
from moevement_ext.store_answers import AnswerWatch
from moevement_ext.system.leaving import listened_for

_POLL_S = 0.1
_STORE_TIMEOUT = timedelta(seconds=60)
_GLANCE = timedelta(seconds=1)
# Timeout of an outside store, which may hang.
_TO_ANSWER_S = 30.0
# Limit for the replacement of a dead worker while there is no store.
_WITHOUT_STORE_S = 600.0
# A worker that fails because of a lost worker may end before the loss is detected.
_SETTLE_S = 1.0
# A job that waits for nodes says so this often.
_REPEAT_S = 300.0
_FITS = re.compile(r'Start (\d+) ranks')  # in a refusal of this number of ranks


class Supervisor:
    """One job. `run` works on one thread; other threads may read attributes and call `stop`.

    Args:
        config: launch configuration of the job.
        on_event: called at once with each event, on the thread of `run`; prints on stderr by
            default.
        starter: makes the starter of the workers; by default workers run on this machine.

    Attributes:
        store: the workers' store, which outlives them; the store of `--sparse-ckpt-store` if the
            program has this flag. If that store is lost, the workers end, and all restart with
            the next store that answers at this address.
        workers: by rank, while `run` runs and afterwards.

    Raises:
        ConfigurationError: a staged failure or the GPUs of this machine do not fit the job, no log
            can be written, or the outside store does not answer.
    """

    def __init__(
        self,
        config: LaunchConfig,
        on_event: Callable[[Event], None] = print_event,
        starter: Callable[[LaunchConfig, FdLoop, Callable[[Event], None]], Starter] = LocalStarter,
    ) -> None:
        self.config = config
        config.make_log_dir()
        self._loop = FdLoop()
        self._report = Journal(config.log_dir, on_event)
        self._starter = starter(config, self._loop, self._report)
        self._answers: AnswerWatch | None = None
        self._reserved = not self._starter.moves_ranks
        self.store = self._connect(_STORE_TIMEOUT)
        self._mailbox = of_launch(self.store, config.launch)
        self.workers: list[Worker] = []
        self._outcome = Outcome(self._report, self._starter.spares_left)
        self._faults = StagedFaults(config)
        self._exit_code: int | None = None
        self._announced_code = 0
        self._bad_ends: list[BadEnd] = []
        self._newest_end: BadEnd | None = None
        self._nodes = config.nodes  # 0: the job waits for nodes
        self._sizes = config.sizes
        self._resize_at = self._repeat_at = math.inf
        self._pending: AllStartAgain | None = None
        self._tail: LogTail | None = None
        self._failed_at_exit: list[str] = []
        self._find_store_at: float | None = None

    def _connect(self, timeout: timedelta) -> TCPStore:
        address = store_address(self.config.flags)
        if address is None:
            return TCPStore(
                '127.0.0.1', 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT
            )
        store = outside.connect(*address, timeout)
        store.set_timeout(_STORE_TIMEOUT)
        self._answers = self._answers or AnswerWatch(store, _TO_ANSWER_S)
        return store

    def _use_new_store(self, to_connect: timedelta = _STORE_TIMEOUT) -> None:
        self.store = self._connect(to_connect)
        self._mailbox = of_launch(self.store, self.config.launch)
        self._reserved = not self._starter.moves_ranks

    def run(self) -> int:
        """Run the job to its end; no process of the job is left afterwards.

        Linux kills all processes when this process ends for any reason. Returns 0, or
        the exit status that the workers announced; the exit code of the `LaunchError` if
        the job was given up; the argument of `stop` if that was called.
        """
        code = 1  # stays 1 after an unexpected exception
        try:
            self._supervise()
            code = self._exit_code or self._announced_code
        except LaunchError as failure:
            self._report(JobFailed(str(failure)))
            code = failure.exit_code
        finally:
            self._kill_all()
            self._outcome.ended(code)
            self._report_remains()
            if self._answers is not None:
                self._answers.close()
            self._report.close()
        return code

    def stop(self, exit_code: int) -> None:
        """Ask all workers to end, then kill them; `run` returns `exit_code`. Any thread."""
        self._exit_code = exit_code

    def _supervise(self) -> None:
        self._start_all(0)
        next_poll = time.monotonic()
        while not all(worker.finished for worker in self.workers):
            self._loop.turn(_POLL_S)
            if self._exit_code is not None:
                return self._terminate()
            try:
                if time.monotonic() >= next_poll:
                    next_poll = time.monotonic() + _POLL_S
                    self._starter.poll()
                    self._poll_store()
                    self._give_up_unkillable_workers(self._living())
                    if self._tail is not None:
                        self._tail.pump()
                self._judge_all()
            except LaunchError as lost:
                self._shrink(lost)
        if self._failed_at_exit:
            raise LaunchError(self._failed_at_exit[0])

    # Attempts of a worker

    def _start_all(self, restarts: int) -> None:
        known, ranks = len(self.workers), self._nodes * self.config.workers_per_node
        self.workers = [*self.workers, *map(Worker, range(known, ranks))][:ranks]
        log = self.config.log_of(ranks - 1)
        self._tail = LogTail(log, self._read) if log is not None and self._faults.pending else None
        self._starter.open(self.store.port, ranks)
        for worker in self.workers:
            self._start(worker, restarts)

    def _start(self, worker: Worker, restarts: int) -> None:
        watched = worker is self.workers[-1] and self._faults.pending
        on_iteration = self._stage_faults if watched else None
        worker.finished = False
        worker.child = self._starter.start(worker.rank, restarts, on_iteration)
        self._loop.watch(worker.child.death, partial(self._ended, worker))

    def _ended(self, worker: Worker) -> None:
        code = self._reap(worker)
        if code != 0:
            self._newest_end = BadEnd(worker, code, time.monotonic())
            self._bad_ends.append(self._newest_end)

    # Bad ends are judged together, since one may have caused another

    def _judge_all(self) -> None:
        if not self._bad_ends or self._find_store_at is not None:
            return
        try:
            self._bad_ends = [end for end in self._bad_ends if not self._was_done(end)]
            if self._bad_ends:
                self._judge_together()
        except DistError:  # an outside store lost its connections or its content
            self._lose_store()

    def _judge_together(self) -> None:
        bad = {end.worker.rank for end in self._bad_ends}
        others = [worker for worker in self.workers if worker.rank not in bad]
        done = [worker for worker in others if self._is_done(worker)]
        refuse_mistakes(self._bad_ends, self.workers)
        self._refuse_size(self._bad_ends[0])
        survivors = read_survivors(self._mailbox)
        ending = any(not worker.child.ended for worker in done)
        if ending and time.monotonic() < self._bad_ends[0].at + self.config.grace_s:
            return  # finished workers may take time to free their memory
        if done:
            raise LaunchError(
                f'{self._bad_ends[0].how} when rank {done[0].rank} had already finished: '
                'a replacement would wait in vain for its peers.'
            )
        if survivors:
            self._replace_all()
        elif not self._may_be_consequence():
            self._start_all_again(min(self._bad_ends, key=lambda end: end.is_error))

    def _was_done(self, end: BadEnd) -> bool:
        """True if all ranks had finished their work, so that none waits for a replacement."""
        worker = end.worker
        if worker.finished:
            return True
        announced = self._announced(worker)
        if announced is None:
            return False
        if end.code != announced:  # reported after the ends of the other workers
            self._failed_at_exit.append(f'{end.how} when it had finished{worker.last_words()}')
        worker.finished = True
        self._announced_code = max(self._announced_code, announced)
        return True

    def _may_be_consequence(self) -> bool:
        """True if all ends are errors, and a lost worker that caused them may still be detected."""
        errors_only = all(end.is_error for end in self._bad_ends)
        early = time.monotonic() < self._bad_ends[0].at + _SETTLE_S
        return errors_only and early and bool(self._living())

    def _reap(self, worker: Worker) -> int:
        code = self._wait_for_end(worker)
        self._report(WorkerEnded(worker.rank, worker.pid, code))
        return code

    def _wait_for_end(self, worker: Worker) -> int:
        self._loop.forget(worker.child.death)
        code = worker.child.reap()
        worker.finished = code == 0
        return code

    def _replace_all(self) -> None:
        while self._bad_ends:
            end = self._bad_ends[0]
            self._outcome.lost(self._mailbox, end)
            announce_failure(self.store, end.worker.rank, end.how)
            refuse_useless(end, self.config.max_restarts)
            self._bad_ends.pop(0)
            self._start(end.worker, end.worker.restarts + 1)

    def _start_all_again(self, cause: BadEnd) -> None:
        """Kill and restart all workers, as they may wait for the dead worker forever."""
        refuse_useless(cause, self.config.max_restarts, self.workers)
        self._restart(self._nodes, cause.how, cause)

    def _restart(self, nodes: int, reason: str, cause: BadEnd | None) -> None:
        """Restart all workers on so many nodes, 0: later; as planned if there is no `cause`."""
        self._stop(self._living())
        self._pending = AllStartAgain(reason, None if nodes == self._nodes else nodes)
        self._report(self._pending)
        self._repeat_at = time.monotonic() + _REPEAT_S
        if nodes != self._nodes:
            self._starter.guests.seating.resize(nodes)
            self._nodes = nodes
        # A new store: in the old one torch would find the dead workers' keys and wait for them.
        try:
            self._use_new_store()
        except ConfigurationError as error:
            raise LaunchError(str(error)) from error
        restarts = 1 + max(any_worker.restarts for any_worker in self.workers)
        if cause is not None:
            self._outcome.all_lost(self._mailbox, cause, restarts)
        self._bad_ends.clear()  # only now: if the store is lost before, the ends are judged again
        if nodes:
            self._start_all(restarts)

    def _stop(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.child.signal(signal.SIGKILL)
        for worker in workers:
            worker.child.dies()
            self._give_up_unkillable_workers([worker])
            code = self._wait_for_end(worker)
            by_itself = code != -signal.SIGKILL
            ended = WorkerEnded(worker.rank, worker.pid, code)
            self._report(ended if by_itself else WorkerStopped(worker.rank, worker.pid))

    def _give_up_unkillable_workers(self, workers: list[Worker]) -> None:
        """Give up nodes of workers that block in the kernel, such as in a hung driver."""
        for worker in workers:
            if not worker.child.to_die_s and not worker.child.dies():
                what = f'rank {worker.rank} (pid {worker.pid}) does not die of SIGKILL'
                worker.child.give_up(f'{what}: it waits in the kernel, see dmesg')

    def _is_done(self, worker: Worker) -> bool:
        return worker.finished or self._announced(worker) is not None

    def _announced(self, worker: Worker) -> int | None:
        return read_finished(self._mailbox, worker.rank, worker.process)

    def _refuse_size(self, end: BadEnd) -> None:
        """Raise `LaunchError` if the program refuses this number of nodes, and names another."""
        named = _FITS.findall(end.worker.last_words()) if end.code == EXIT_USER_ERROR else []
        fits = int(named[-1]) // self.config.workers_per_node if named else 0
        if 0 < fits < self._nodes < max(self._sizes):
            self._sizes -= set(range(fits + 1, self._nodes + 1))
            raise LaunchError(end.how, EXIT_WHOLE_JOB)

    def _fitting(self) -> int:
        """The largest number of nodes that are there, and that the program has not refused."""
        there = range(len(self._starter.guests.usable) + 1)
        return max(self._sizes.intersection(there), default=0)

    def _shrink(self, lost: LaunchError) -> None:
        """Go on with fewer nodes, or wait for more, after the loss of one; or raise `lost`."""
        nodes = self._fitting()
        if lost.exit_code != EXIT_WHOLE_JOB or nodes not in self._sizes - {self._nodes}:
            raise lost
        self._restart(nodes, str(lost), self._newest_end if nodes else None)

    def _resize(self) -> None:
        """Start the job on the nodes that are there, after a planned end, once it is time.

        More nodes must have been back for a time, fewer must have had guests for a time.
        """
        nodes, now = self._fitting(), time.monotonic()
        if nodes < self._nodes:
            why, pause_s = 'nodes are still lost', self.config.layout_after_s
        else:
            why, pause_s = 'nodes are back', self.config.grow_after_s if self._nodes else 0.0
        self._resize_at = min(self._resize_at, now + pause_s) if nodes != self._nodes else math.inf
        if self._pending is not None and not self._nodes and now >= self._repeat_at:
            self._repeat_at = now + _REPEAT_S
            self._report(self._pending)
        if now < self._resize_at or any(map(self._is_done, self.workers)):
            return
        self._terminate()
        if any(map(self._is_done, self.workers)) and not self._starter.guests.hold_windows():
            self.stop(0)  # it has ended by itself meanwhile
        elif self._exit_code is None:
            self._restart(nodes, why, None if self._nodes else self._newest_end)

    # The end

    def _terminate(self) -> None:
        """Send all workers their exit signal, and wait at most `grace_s` for their ends."""
        asked = listened_for(self.config.flags)
        for worker in self._living():
            # From now on a dead worker is not replaced.
            self._loop.watch(worker.child.death, partial(self._reap, worker))
            worker.child.signal(asked)
            worker.child.signal(signal.SIGCONT)  # wakes a stopped worker
        deadline = time.monotonic() + self.config.grace_s
        while self._living() and time.monotonic() < deadline:
            self._loop.turn(_POLL_S)

    def _kill_all(self) -> None:
        for worker in self._living():
            worker.child.signal(signal.SIGKILL)
        for worker in self._living():
            if worker.child.dies():
                self._reap(worker)
            else:
                self._report(WorkerUnkillable(worker.rank, worker.pid))
        self._starter.close()
        self._loop.close()

    def _report_remains(self) -> None:
        """Report the windows that an unfinished job left behind."""
        try:
            memory = read_memory(self._mailbox)
        except DistError:
            return
        if memory is not None and holds_windows(memory) and not is_in_use(memory):
            self._report(MemoryKept(str(memory), unnamed_run_id(self.config.flags)))

    def _living(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.child.ended]

    # Killed on purpose

    def _poll_store(self) -> None:
        try:
            if self._find_store_at is None or self._find_store():
                present_round(self.store)  # raises if it is lost; the others do not always ask it
                self._kill_the_late()
                self._outcome.poll(self._mailbox)
                self._reserve_elsewhere()
                self._resize()
        except DistError:
            self._lose_store()

    def _reserve_elsewhere(self) -> None:
        """Once all ranks have reported their files, reserve memory for them on spare nodes."""
        memory = None if self._reserved else read_memory(self._mailbox)
        kept = read_files(self._mailbox, len(self.workers)) if memory is not None else None
        if memory is not None and kept is not None:
            self._reserved = True
            self._starter.reserve(memory, kept)

    def _lose_store(self) -> None:
        if self._find_store_at is None:
            self._report(StoreGone(value_of(self.config.flags, STORE_FLAG)))
            self._find_store_at = time.monotonic()

    def _find_store(self) -> bool:
        """Return True if the store answers again; waits at most about `_GLANCE`.

        Raises `LaunchError` if a dead worker has waited too long for the store.
        """
        assert self._find_store_at is not None
        if time.monotonic() < self._find_store_at:
            return False
        try:
            self._use_new_store(_GLANCE)
        except ConfigurationError as error:
            self._find_store_at = time.monotonic() + _GLANCE.total_seconds()
            if self._bad_ends and time.monotonic() > self._bad_ends[0].at + _WITHOUT_STORE_S:
                end = self._bad_ends[0]
                raise LaunchError(
                    f'{end.how}, and no worker can take its place: {error}'
                ) from error
            return False
        self._find_store_at = None
        self._report(StoreFound())
        return True

    def _kill_the_late(self) -> None:
        for worker in late_workers(self._mailbox, self._living()):
            worker.child.signal(signal.SIGKILL)
            self._report(WorkerLate(worker.rank, worker.pid))

    def _read(self, line: str) -> None:
        iteration = logged_iteration(line)
        if iteration is not None:
            self._stage_faults(iteration)

    def _stage_faults(self, iteration: int) -> None:
        for fault in self._faults.due(iteration):
            if fault.action is StagedAction.RETURN_NODE:
                self._starter.return_node(fault.target)
                self._report(FaultStaged(str(fault)))
            elif fault.action.strikes_node:
                self._kill_node(fault)
            elif fault.target < len(self.workers):  # there may be fewer now
                stop = fault.action is StagedAction.STOP
                number = signal.SIGSTOP if stop else signal.SIGKILL
                self.workers[fault.target].child.signal(number)
                self._report(FaultStaged(str(fault)))

    def _kill_node(self, fault: StagedFault) -> None:
        memory = partial(self._faults.memory_of, read_memory(self._mailbox))
        for_good = fault.action is StagedAction.LOSE_NODE
        deleted = self._starter.lose_node(fault.target, memory, for_good)
        self._report(FaultStaged(str(fault), None if deleted is None else str(deleted)))
