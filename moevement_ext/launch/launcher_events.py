# SPDX-License-Identifier: Apache-2.0
"""What the launcher reports; as text one line for a person, in `launcher.jsonl` one of JSON."""

import signal
from collections.abc import Callable
from pathlib import Path

from moevement_ext.config import ConfigurationError
from moevement_ext.events import Event, EventFile, encode

FILE = 'launcher.jsonl'
"""In the directory of `--log-dir`; read by `moevement_ext.events.decode`."""


def describe_exit(code: int) -> str:
    """How a process ended.

    Args:
        code: exit status, or the negative number of a signal.
    """
    if code >= 0:
        return f'ended with exit status {code}'
    try:
        return f'was killed by {signal.Signals(-code).name}'
    except ValueError:  # a real-time signal has no name
        return f'was killed by signal {-code}'


class WorkerLaunched(Event, frozen=True):
    """A worker runs, in its first life or a later one."""

    name = 'worker_launched'
    rank: int
    pid: int
    restarts: int
    """How often this rank was restarted."""
    was_spare: bool

    def __str__(self) -> str:
        how = 'a hot spare takes over' if self.was_spare else 'started'
        return f'rank {self.rank}: {how}, pid {self.pid}, restart {self.restarts}'


class WorkerEnded(Event, frozen=True):
    """A worker is gone."""

    name = 'worker_ended'
    rank: int
    pid: int
    code: int
    """Exit status, or the negative number of the signal that killed it."""

    def __str__(self) -> str:
        return f'rank {self.rank} (pid {self.pid}) {describe_exit(self.code)}'


class WorkerStopped(Event, frozen=True):
    """The launcher has killed a worker to start it again with all the others."""

    name = 'worker_stopped'
    rank: int
    pid: int

    def __str__(self) -> str:
        return f'rank {self.rank} (pid {self.pid}) is stopped'


class WorkerLostAtExit(Event, frozen=True):
    """A worker that had done all its work was killed by a signal before its process ended."""

    name = 'worker_lost_at_exit'
    rank: int
    pid: int
    code: int
    """The negative number of the signal."""

    def __str__(self) -> str:
        how = describe_exit(self.code)
        return f'warning: rank {self.rank} (pid {self.pid}) had finished, but {how} at its exit'


class WorkerLate(Event, frozen=True):
    """A worker has not come to join the others, who wait for it; it is killed."""

    name = 'worker_late'
    rank: int
    pid: int

    def __str__(self) -> str:
        return f'rank {self.rank} (pid {self.pid}) has not come to join the others: killed'


class WorkerUndead(Event, frozen=True):
    """A worker was killed and does not die; the launcher ends without it."""

    name = 'worker_undead'
    rank: int
    pid: int

    def __str__(self) -> str:
        return f'rank {self.rank} (pid {self.pid}) does not die of SIGKILL; it is left behind'


class AllStartAgain(Event, frozen=True):
    """The others cannot go on without the worker that died: all are killed and started again."""

    name = 'all_start_again'
    reason: str

    def __str__(self) -> str:
        return f'all workers start again, since {self.reason}'


class WorkerEvicted(Event, frozen=True):
    """The others found this worker hung; it is killed."""

    name = 'worker_evicted'
    rank: int
    pid: int

    def __str__(self) -> str:
        return f'rank {self.rank} (pid {self.pid}) was found hung by the others: killed'


class StoreGone(Event, frozen=True):
    """Nobody serves the store any more; who dies meanwhile waits to be replaced."""

    name = 'store_gone'
    address: str | None
    """That of `--sparse-ckpt-store`."""

    def __str__(self) -> str:
        which = '' if self.address is None else f' {self.address}'
        return (
            f'the store{which} is lost: start one there (python -m moevement_ext.store); until '
            'then no worker is replaced'
        )


class StoreFound(Event, frozen=True):
    """A store is there again: the same, or an empty one."""

    name = 'store_found'

    def __str__(self) -> str:
        return 'the store is reached again'


class SpareReady(Event, frozen=True):
    """A hot spare has imported the program."""

    name = 'spare_ready'
    pid: int

    def __str__(self) -> str:
        return f'hot spare ready, pid {self.pid}'


class SpareEnded(Event, frozen=True):
    """A hot spare is gone before it was used; one that never was ready is not replaced."""

    name = 'spare_ended'
    pid: int
    code: int
    was_ready: bool

    def __str__(self) -> str:
        how = '' if self.was_ready else ' before it was ready; there will be one spare less'
        return f'hot spare (pid {self.pid}) {describe_exit(self.code)}{how}'


class SpareMissing(Event, frozen=True):
    """A hot spare could not be started; the job goes on with one less."""

    name = 'spare_missing'
    reason: str

    def __str__(self) -> str:
        return f'a hot spare cannot be started, there will be one less: {self.reason}'


class FaultStaged(Event, frozen=True):
    """A staged failure happened."""

    name = 'fault_staged'
    fault: str
    """What was given on the command line."""
    deleted: str | None = None
    """Host memory of the node that was killed."""

    def __str__(self) -> str:
        also = '' if self.deleted is None else f'; deleted {self.deleted}'
        return f'staged failure {self.fault}{also}'


class NodeReady(Event, frozen=True):
    """A host is reached and can take the place of a node of the job."""

    name = 'node_ready'
    host: str

    def __str__(self) -> str:
        return f'host {self.host} is ready'


class NodeSeated(Event, frozen=True):
    """A host is a node of the job from now on."""

    name = 'node_seated'
    host: str
    node: int

    def __str__(self) -> str:
        return f'host {self.host} is node {self.node} of the job'


class NodeLost(Event, frozen=True):
    """A host is not reached any more, with all that ran there."""

    name = 'node_lost'
    host: str
    node: int | None
    """That it was; None: a spare."""
    reason: str

    def __str__(self) -> str:
        what = 'a spare' if self.node is None else f'node {self.node} of the job'
        return f'host {self.host}, {what}, is lost: {self.reason}'


class NodeMissing(Event, frozen=True):
    """A host was asked for an agent, and none came."""

    name = 'node_missing'
    host: str
    reason: str

    def __str__(self) -> str:
        return f'host {self.host} is not reached: {self.reason}'


class DevicesFailing(Event, frozen=True):
    """Something is wrong with a device of a host."""

    name = 'devices_failing'
    host: str
    trouble: str
    usable: bool

    def __str__(self) -> str:
        what = 'can be used all the same' if self.usable else 'gets no rank any more'
        return f'host {self.host} {what}: {self.trouble}'


class JobRecovered(Event, frozen=True):
    """All workers are back after a failure; they say so in a line."""

    name = 'job_recovered'
    line: str
    spares: str
    """What is left to take the place of the next that is lost."""

    def __str__(self) -> str:
        line = self.line.strip().removeprefix('sparse ckpt | ').removesuffix(' |')
        kept = [field for field in line.split(' | ') if not field.startswith('spares left: ')]
        return ' | '.join([*kept[1:], f'spares left: {self.spares}'])  # it has a time of its own

    @property
    def nothing_lost(self) -> bool:
        """No iteration, and no bit that was compared."""
        differs = ', differing: ' in self.line and ', differing: 0' not in self.line
        return ' lost iterations: 0 ' in self.line and not differs


class JobEnded(Event, frozen=True):
    """All workers are gone: the last thing that a launcher says of a job, but for its memory."""

    name = 'job_ended'
    code: int
    seconds: float
    failures: int
    """Workers that were replaced alone, or new starts of all."""
    recoveries: int
    """How often all ranks have said that they are back."""

    def __str__(self) -> str:
        how = 'ended well' if self.code == 0 else f'ended with exit status {self.code}'
        return (
            f'the job {how} after {in_words(self.seconds)} | workers lost: {self.failures} | '
            f'recoveries: {self.recoveries}'
        )


def in_words(seconds: float) -> str:
    """A duration for a person, such as `2 h 03 min` or `12 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f'{hours} h {minutes:02d} min'
    return f'{minutes} min {rest:02d} s' if minutes else f'{rest} s'


class JobFailed(Event, frozen=True):
    """The job is given up; all its processes are killed."""

    name = 'job_failed'
    reason: str

    def __str__(self) -> str:
        return f'job failed: {self.reason}'


class MemoryKept(Event, frozen=True):
    """All workers are gone; what they kept in host memory is not."""

    name = 'memory_kept'
    directory: str

    def __str__(self) -> str:
        return (
            f'windows of this run stay in {self.directory}: launch the same job again to go on '
            'from them, or remove the directory'
        )


def line_of(event: Event) -> bytes:
    """The line of an event of a launcher, about the process that it names, if any."""
    return encode(event, event.rank, event.pid)


class Journal:
    """Hands on what a launcher reports, and appends it to `launcher.jsonl` in its `--log-dir`.

    Args:
        log_dir: None: it is only handed on.
        then: called with each event.

    Raises:
        ConfigurationError: the file cannot be written to.
    """

    def __init__(self, log_dir: Path | None, then: Callable[[Event], None]) -> None:
        self._then = then
        self._file: EventFile | None = None
        if log_dir is not None:
            try:
                self._file = EventFile(log_dir / FILE)
            except OSError as error:
                raise ConfigurationError(
                    f'--log-dir {log_dir}: events cannot be written there: {error}; give another '
                    'directory.'
                ) from error

    def __call__(self, event: Event) -> None:
        """Something happened."""
        if self._file is not None:
            self._file.append(line_of(event))
        self._then(event)

    def close(self) -> None:
        """What comes later is only handed on."""
        if self._file is not None:
            self._file.close()
