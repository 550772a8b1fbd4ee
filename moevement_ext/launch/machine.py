# SPDX-License-Identifier: Apache-2.0
"""The job's processes on one machine: workers and hot spares.

The launcher itself owns the machine of emulated nodes; under Slurm each agent owns one.
"""

import errno
import math
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from moevement_ext.config_file import value_of
from moevement_ext.errors import HostMemoryError
from moevement_ext.events import Event
from moevement_ext.launch import messages
from moevement_ext.launch.child import Child, FdLoop, SpawnedChild
from moevement_ext.launch.launch_config import LaunchConfig
from moevement_ext.launch.output import Relay, last_lines, say_of_launcher
from moevement_ext.launch.remote import NO_ENDS
from moevement_ext.launch.spare_pool import SparePool
from moevement_ext.launch.staged_faults import logged_iteration
from moevement_ext.memory.budget import HostMemoryPlan, memory_of_files
from moevement_ext.memory.holder_lock import StoreInUseError
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.reservation import ReservedPages
from moevement_ext.memory.shelf import directories_of
from moevement_ext.memory.window.refusal import UnreadableWindow
from moevement_ext.system import nvml
from moevement_ext.system.death_notice import DeathNotice, signal_that_kills

_NOT_STARTED = 1
# Errors of a fork that another attempt may not have.
_NO_ROOM = errno.EAGAIN, errno.ENOMEM
_FOR_ROOM_S = 10.0
_PAUSE_S = 0.1
_STDERR = 2
NODE = 'MOEVEMENT_NODE'
"""Environment variable of a worker: the name of its node."""


class _Running(NamedTuple):
    """A started worker that is not yet reaped."""

    child: Child
    notice: DeathNotice
    node: str
    rank: int
    log: Path | None
    relay: Relay | None
    """Passes on the worker's output, if the worker has no log."""

    def last_lines(self) -> list[str]:
        if self.relay is not None:
            return self.relay.last_lines
        return [] if self.log is None else last_lines(self.log)


class Machine:
    """Starts and signals processes and reports their ends. Not thread-safe.

    Args:
        job: the program and its environment.
        variables: environment variables of all processes here; these override the user's.
        loop: calls this object when a process prints, is ready or dies.
        send: called with messages to the supervisor.
        report: called with events of hot spares.
    """

    def __init__(
        self,
        job: messages.Program,
        variables: Mapping[str, str],
        loop: FdLoop,
        send: Callable[[messages.FromAgent], None],
        report: Callable[[Event], None],
    ) -> None:
        log_dir = None if job.log_dir is None else Path(job.log_dir)
        self._config = LaunchConfig(job.program, tuple(job.flags), log_dir=log_dir)
        self._environment = {**job.defaults, **os.environ, **variables}
        self._loop = loop
        self._send = send
        start = self._start_ordered
        self.spares = SparePool(self._config, self._environment, loop, report, start)
        self._ordered: deque[messages.StartWorker] = deque()
        self._running: dict[int, _Running] = {}
        self._logs = set[Path]()
        self._pages: ReservedPages | None = None
        self._reserving: threading.Thread
        # Keys of workers that die, from other threads; and reported ones, with the rank whose next
        # worker must wait until the memory is freed.
        self._dying = queue.SimpleQueue[int]()
        self._has_dying = os.eventfd(0)
        self._freeing: dict[int, int | None] = {}
        loop.watch(self._has_dying, self._report_dying)

    def obey(self, message: messages.FromSupervisor) -> None:
        """Carry out an order of the supervisor."""
        match message:
            case messages.StartWorker():
                self._ordered.append(message)
                self._start_ordered()
            case messages.Signal(key, number):
                self._signal(key, number)
            case messages.KeepSpares(count):
                self.spares.keep(count)
            case messages.Reserve(directory, run_id, sizes):
                self._reserve(NodeStore(Path(directory), run_id, self._environment[NODE]), sizes)
            case messages.LookAtMemory():
                self._send(self._memory_seen(message))
            case messages.Vacate(node, directory, run_id, ranks):
                self._vacate(NodeStore(Path(directory), run_id, node), ranks)
            case messages.SimulateNodeLoss(node, directory, run_id):
                self._simulate_node_loss(node, NodeStore(Path(directory), run_id, node))

    def report_kills(self) -> None:
        """Report workers that another process has killed, as they may never die. Called often."""
        for key, one in self._running.items():
            known = key in self._freeing or one.child.to_die_s < math.inf
            if not known and signal_that_kills(one.child.pid) == signal.SIGKILL:
                self._send(messages.Killed(key))

    def close(self) -> None:
        for running in self._running.values():
            running.child.signal(signal.SIGKILL)
        for running in self._running.values():
            if running.child.dies():
                running.child.reap()
            if running.relay is not None:
                self._loop.forget(running.relay.fd)
                os.close(running.relay.fd)
            running.notice.close()
        self._loop.forget(self._has_dying)
        os.close(self._has_dying)
        self.spares.close()
        if self._pages is not None:
            self._end_reserving(self._pages)
            self._pages.remove()

    def _start_ordered(self) -> None:
        """Start the ordered workers, unless the process that will fork them still imports."""
        for order in list(self._ordered):
            if not self.spares.is_awaited and order.rank not in self._freeing.values():
                self._ordered.remove(order)
                self._start(order)

    def _signal(self, key: int, number: int) -> None:
        if key in self._running:
            self._running[key].child.signal(number)
            return
        for order in [order for order in self._ordered if order.key == key]:
            if number not in NO_ENDS:
                self._ordered.remove(order)
                self._send(messages.Ended(key, -number, []))

    def _start(self, order: messages.StartWorker) -> None:
        """Start a worker; an OS error that lasts, or of its log, counts as the worker's end."""
        node = {**self._environment, **order.variables}[NODE]
        log = self._config.log_of(order.rank)
        relay = notice = None
        try:
            if log is None:
                relay, output = self._relayed(order)
            else:
                output = self._once_there_is_room(partial(self._opened, log))
            with output:
                notice = DeathNotice(partial(self._dies, order.key))
                start = partial(self._new_worker, order.variables | notice.variables, output)
                child, was_spare = self._once_there_is_room(start)
        except OSError as error:
            if relay is not None:
                os.close(relay.fd)
            if notice is not None:
                notice.close()
            why = f'cannot be started on {node}: {error}'
            self._send(messages.Ended(order.key, _NOT_STARTED, [why]))
            return
        if relay is not None:
            self._loop.watch(relay.fd, partial(self._pump, relay))
        self._running[order.key] = _Running(child, notice, node, order.rank, log, relay)
        self._loop.watch(child.death, partial(self._ended, order.key))
        self._send(messages.Started(order.key, child.pid, was_spare=was_spare))

    def _once_there_is_room[T](self, step: Callable[[], T]) -> T:
        """Repeat `step` for some seconds while it fails for lack of processes or memory.

        The processes of the dead worker count until they have ended.
        """
        deadline = time.monotonic() + _FOR_ROOM_S
        while True:
            try:
                return step()
            except OSError as error:
                if error.errno not in _NO_ROOM or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S)

    def _new_worker(self, variables: Mapping[str, str], output: BinaryIO) -> tuple[Child, bool]:
        """Start a worker; the flag is True if a hot spare forked the worker or became it."""
        environment = {**self._environment, **variables}
        spare = self.spares.take(environment, output)
        if spare is not None:
            return spare, True
        command = [self._config.program, *self._config.flags]
        return SpawnedChild(command, environment, output), False

    def _relayed(self, order: messages.StartWorker) -> tuple[Relay, BinaryIO]:
        """Create a pipe to this process's output; returns its relay and its write end."""
        on_line = partial(self._on_line, order.key) if order.watched else _ignore
        fd, output = os.pipe()
        return Relay(fd, f'[rank {order.rank}] ', on_line), os.fdopen(output, 'wb')

    def _opened(self, log: Path) -> BinaryIO:
        """Open a log; stderr instead of one that could be opened before, so that the job goes on.

        Raises `OSError` if the log could never be opened, which is a user error.
        """
        try:
            output = _with_room(log.open('ab'))
        except OSError as error:
            if log not in self._logs:
                raise
            say_of_launcher(
                f'its further lines are printed here, as its log cannot be opened: {error}'
            )
            return os.fdopen(os.dup(_STDERR), 'ab')
        self._logs.add(log)
        return output

    def _dies(self, key: int) -> None:
        """Any thread."""
        self._dying.put(key)
        os.eventfd_write(self._has_dying, 1)

    def _report_dying(self) -> None:
        """Report workers that a signal ends before they have; another one must still wait."""
        os.eventfd_read(self._has_dying)
        while not self._dying.empty():
            key = self._dying.get()
            running = self._running.get(key)
            if key in self._freeing:  # after a long wait, which may never end
                self._freeing[key] = None
                self._start_ordered()
            elif running is not None and (number := signal_that_kills(running.child.pid)):
                running.child.signal(signal.SIGKILL)  # also what it has started
                self._freeing[key] = running.rank
                self._send(messages.Ended(key, -number, running.last_lines()))

    def _ended(self, key: int) -> None:
        running = self._running.pop(key)
        self._loop.forget(running.child.death)
        code = running.child.reap()
        if code:
            self.spares.retry()
        running.notice.close()
        if running.relay is not None:
            self._loop.forget(running.relay.fd)
            running.relay.finish()
            os.close(running.relay.fd)
        if key not in self._freeing:
            self._send(messages.Ended(key, code, running.last_lines() if code else []))
        self._freeing.pop(key, None)
        self._start_ordered()

    def _reserve(self, memory: NodeStore, sizes: Sequence[int]) -> None:
        """Reserve pages on a separate thread, so that orders are not delayed."""
        if self._pages is not None:
            self._end_reserving(self._pages)
        self._pages = ReservedPages(memory)
        self._reserving = threading.Thread(
            target=self._pages.reserve, args=(sizes,), name='launch-reserve', daemon=True
        )
        self._reserving.start()

    def _end_reserving(self, pages: ReservedPages) -> None:
        """Stop, and wait for the current file, which would otherwise appear after `remove`."""
        pages.end()
        self._reserving.join()

    def _memory_seen(self, asked: messages.LookAtMemory) -> messages.MemorySeen:
        devices = nvml.of_this_node() if asked.devices else None
        trouble = '' if devices is None else devices.shortage(asked.devices, asked.seats)
        if not asked.run_id:
            return messages.MemorySeen(asked.node, trouble)
        store = NodeStore(Path(asked.directory), asked.run_id, asked.node)
        budget = value_of(self._config.flags, '--sparse-ckpt-host-memory-gb')
        plan = HostMemoryPlan({rank: memory_of_files(n) for rank, n in asked.nbytes.items()})
        windows: list[tuple[int, int, str]] = []
        try:
            if asked.nbytes:
                plan.check(float(budget) if budget else None, store.path)
            for one in (*store.scan(), *store.scan_stubs()):
                windows.append((one.holder, one.owner, str(one.name)))
        except (HostMemoryError, UnreadableWindow) as error:
            trouble = trouble or str(error)
        return messages.MemorySeen(asked.node, trouble, windows)

    def _vacate(self, memory: NodeStore, ranks: Collection[int]) -> None:
        node = memory.path.name
        here = [one for one in self._running.values() if one.node == node and one.rank in ranks]
        for running in here:
            running.child.signal(signal.SIGKILL)
            running.child.dies()
        for rank in ranks:
            with suppress(StoreInUseError, HostMemoryError, OSError):
                memory.lock(rank)
                memory.remove_rank(rank)

    def _simulate_node_loss(self, node: str, memory: NodeStore) -> None:
        here = [running.child for running in self._running.values() if running.node == node]
        for child in here:
            child.signal(signal.SIGKILL)
        for child in here:
            child.ended_well()  # a living process might write to the deleted memory
        for run in directories_of(memory.root, memory.run_id):
            NodeStore(memory.root, run, node).remove()

    def _pump(self, relay: Relay) -> None:
        if not relay.pump():
            self._loop.forget(relay.fd)

    def _on_line(self, key: int, line: str) -> None:
        iteration = logged_iteration(line)
        if iteration is not None:
            self._send(messages.IterationLogged(key, iteration))


def _with_room(log: BinaryIO) -> BinaryIO:
    """Return a log that a worker can print to.

    Raises:
        OSError: its file system is full, so a worker that prints a line would die.
    """
    system = os.fstatvfs(log.fileno())
    if system.f_blocks and not system.f_bavail:
        log.close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(log.name))
    return log


def _ignore(line: str) -> None:
    """Drop the line: the supervisor watches the progress of one rank only."""
