# SPDX-License-Identifier: Apache-2.0
"""Events of the launcher: one line of text on stderr, one line of JSON in `launcher.jsonl`."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from moevement_ext.config import ConfigurationError
from moevement_ext.events import Event, EventFile, encode

FILE = 'launcher.jsonl'
"""File in the directory of `--log-dir`; `moevement_ext.events.decode` reads it."""


def describe_exit(code: int) -> str:
    """Describe how a process ended, by exit status or the negative number of a signal."""
    if code >= 0:
        return f'ended with exit status {code}'
    try:
        return f'was killed by {signal.Signals(-code).name}'
    except ValueError:  # a real-time signal has no name
        return f'was killed by signal {-code}'


def name_of(rank: int, pid: int) -> str:
    return f'rank {rank} (pid {pid})' if pid else f'rank {rank} (not started yet)'


class _Worded(Event, frozen=True):
    text: ClassVar[str]
    """The line of text, with fields of the event as `{0.name}`."""

    def __str__(self) -> str:
        return self.text.format(self)


class _WorkerEvent(Event, frozen=True):
    rank: int
    pid: int
    what: ClassVar[str] = ''
    """What happened to the process, in words."""

    def __str__(self) -> str:
        return f'{name_of(self.rank, self.pid)} {self.what}'


class WorkerLaunched(_WorkerEvent, frozen=True):
    """A worker process started, for the first time or again."""

    restarts: int
    """Number of restarts of this rank."""
    was_spare: bool
    """A hot spare forked it, or became it."""

    def __str__(self) -> str:
        how = 'a hot spare takes over' if self.was_spare and self.restarts else 'started'
        return f'rank {self.rank}: {how}, pid {self.pid}, restart {self.restarts}'


class WorkerEnded(_WorkerEvent, frozen=True):
    """A worker process ended."""

    code: int
    """Exit status, or the negative number of the signal that killed it."""

    def __str__(self) -> str:
        return f'{name_of(self.rank, self.pid)} {describe_exit(self.code)}'


class WorkerStopped(_WorkerEvent, frozen=True):
    """The launcher killed a worker in order to restart all workers together."""

    what = 'is stopped'


class WorkerLate(_WorkerEvent, frozen=True):
    """The launcher killed a replacement that did not join the waiting workers in time."""

    what = 'did not join the other ranks in time: killed'


class WorkerUnkillable(_WorkerEvent, frozen=True):
    """A killed worker does not die; the launcher ends without waiting for it."""

    what = 'does not die of SIGKILL; it is left behind'


class AllStartAgain(Event, frozen=True):
    """The launcher restarts all workers, as they cannot continue without the dead worker."""

    reason: str
    nodes: int | None = None
    """Number of nodes of the job, if it changes; 0: it waits for nodes."""

    def __str__(self) -> str:
        where = '' if self.nodes is None else f' on {self.nodes} nodes'
        what = 'the job waits for nodes' if self.nodes == 0 else f'all workers start again{where}'
        return f'{what}, since {self.reason}'


class StoreGone(Event, frozen=True):
    """The store does not answer; dead workers are replaced once it is back."""

    address: str | None
    """Address of `--sparse-ckpt-store`; None: the launcher's own store."""

    def __str__(self) -> str:
        if self.address is None:
            return 'the store of this launcher does not answer; until it does no worker is replaced'
        return (
            f'the store {self.address} is lost: start one there (moevement store); '
            'until then no worker is replaced'
        )


class StoreFound(_Worded, frozen=True):
    """A store answers again: the same store, or an empty one."""

    text = 'the store is reached again'


class SpareReady(Event, frozen=True):
    """A hot spare has imported the program."""

    pid: int
    forks: bool = True
    """It can fork any number of workers; otherwise it can become one."""

    def __str__(self) -> str:
        why = ': importing the program starts threads or uses a GPU, so that workers start fresh'
        return f'hot spare ready, pid {self.pid}{"" if self.forks else why}'


class SpareEnded(Event, frozen=True):
    """A hot spare ended before use; one that was never ready is replaced when a worker is."""

    pid: int
    code: int
    was_ready: bool

    def __str__(self) -> str:
        how = '' if self.was_ready else ' before it was ready: one less until a worker is replaced'
        return f'hot spare (pid {self.pid}) {describe_exit(self.code)}{how}'


class SpareMissing(_Worded, frozen=True):
    """A hot spare could not start; there is one fewer until a worker is replaced."""

    reason: str

    text = 'a hot spare cannot be started, one less until a worker is replaced: {0.reason}'


class FaultStaged(Event, frozen=True):
    """A staged failure happened."""

    fault: str
    """The failure as given on the command line."""
    deleted: str | None = None
    """Host memory directory of the killed node."""

    def __str__(self) -> str:
        also = '' if self.deleted is None else f'; deleted {self.deleted}'
        return f'staged failure {self.fault}{also}'


class NodeReady(_Worded, frozen=True):
    """A host is connected and can take a seat of the job."""

    host: str

    text = 'host {0.host} is ready'


class NodeSeated(_Worded, frozen=True):
    """A host took a seat of the job."""

    host: str
    node: int

    text = 'host {0.host} is node {0.node} of the job'


class GuestsSeated(Event, frozen=True):
    """The ranks of a seat go on at a host that has a seat, as there is no spare."""

    host: str
    node: int
    """The seat."""
    placement: str
    """Number of nodes, and where all guests are."""
    exposed: int = 0
    """Ranks whose windows are lost with this host."""

    def __str__(self) -> str:
        risk = f'; its loss would cost windows of {self.exposed} ranks' if self.exposed else ''
        return f'node {self.node} of the job goes on at host {self.host}{risk} | {self.placement}'


class NodeLost(Event, frozen=True):
    """The launcher lost a host, with all processes there; one event for each of its seats."""

    host: str
    node: int | None
    """The seat of the host, that is, its node number in the job; None: a spare."""
    reason: str

    def __str__(self) -> str:
        what = 'a spare' if self.node is None else f'node {self.node} of the job'
        return f'host {self.host}, {what}, is lost: {self.reason}'


class NodeMissing(_Worded, frozen=True):
    """The agent of a host did not connect."""

    host: str
    reason: str

    text = 'host {0.host} is not reached: {0.reason}'


class DevicesFailing(_Worded, frozen=True):
    """A device of a host is unusable."""

    host: str
    trouble: str
    usable: bool = False
    """Always false; files of earlier versions also have true."""

    text = 'host {0.host} gets no more ranks: {0.trouble}'


class JobRecovered(Event, frozen=True):
    """All workers have recovered from a failure; `line` is their report."""

    line: str
    spares: str
    """Description of the remaining spares."""

    def __str__(self) -> str:
        line = self.line.strip().removeprefix('sparse ckpt | ').removesuffix(' |')
        # Without the report's time of day: the launcher prints its own.
        return f'{line.partition(" | ")[2]} | spares left: {self.spares}'

    @property
    def nothing_lost(self) -> bool:
        """True if the recovery lost no iteration and no compared bit differs."""
        differs = ', differing: ' in self.line and ', differing: 0' not in self.line
        return ' lost iterations: 0 ' in self.line and not differs


class JobEnded(Event, frozen=True):
    """All workers ended; only `MemoryKept` may follow this event."""

    code: int
    seconds: float
    failures: int
    """Number of replaced workers, or of restarts of all workers."""
    recoveries: int
    """Number of completed recoveries."""

    def __str__(self) -> str:
        how = 'ended well' if self.code == 0 else f'ended with exit status {self.code}'
        return (
            f'the job {how} after {duration(self.seconds)} | workers lost: {self.failures} | '
            f'recoveries: {self.recoveries}'
        )


def duration(seconds: float) -> str:
    """Format a duration: `3 ms`, `4.2 s`, `3 min 05 s`, `2 h 07 min`, `5 d 04 h`."""
    if seconds < 1:
        return f'{1000 * seconds:.3g} ms' if seconds else '0 s'
    if seconds < 60:
        return f'{seconds:.1f} s'
    whole = round(seconds)
    if whole < 3600:
        return f'{whole // 60} min {whole % 60:02} s'
    if whole < 86400:
        return f'{whole // 3600} h {whole % 3600 // 60:02} min'
    return f'{whole // 86400} d {whole % 86400 // 3600:02} h'


class JobFailed(_Worded, frozen=True):
    """The launcher gave up the job and killed all its processes."""

    reason: str

    text = 'job failed: {0.reason}'


class MemoryKept(Event, frozen=True):
    """All workers ended; their windows in host memory remain."""

    directory: str
    run_id: str | None = None
    """Run id that another job must name to find them; None: the same flags suffice."""

    def __str__(self) -> str:
        named = '' if self.run_id is None else f' with --sparse-ckpt-run-id {self.run_id}'
        return (
            f'windows of this run stay in {self.directory}: launch the same job again{named} to go '
            'on from them, or remove the directory'
        )


def line_of(event: Event) -> bytes:
    """Encode an event as a line, with the rank and pid that the event names, if any."""
    return encode(event, event.rank, event.pid)


class Journal:
    """Passes on the launcher's events and appends them to `launcher.jsonl` in `--log-dir`, if any.

    Raises `ConfigurationError` if the file cannot be written to.
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
        if self._file is not None:
            self._file.append(line_of(event))
        self._then(event)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
