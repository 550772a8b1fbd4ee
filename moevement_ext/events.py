# SPDX-License-Identifier: Apache-2.0
"""Events of a run as JSON lines, one file per rank: what there is, its writer and its reader.

A line has the fields of `Event`, the name of the event among them, and those of its kind. Those of
launchers, in a file of the launcher, are in `launch/launcher_events.py`.
"""

import enum
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from moevement_ext.errors import UserError

logger = logging.getLogger(__name__)


class EventName(enum.StrEnum):
    """Value of `event` in a line of a rank."""

    WORKER_STARTED = 'worker_started'
    JOB_DESCRIBED = 'job_described'
    PROTECTED = 'protected'
    LOSS_LOGGED = 'loss_logged'
    WINDOW_COMMITTED = 'window_committed'
    WINDOW_PERSISTED = 'window_persisted'
    WINDOW_ON_DISK = 'window_on_disk'
    REPLANNED = 'replanned'
    PROTECTION_REDUCED = 'protection_reduced'
    FAILURE_DETECTED = 'failure_detected'
    RECOVERY_PHASE = 'recovery_phase'
    RECOVERY_STARTED = 'recovery_started'
    RECOVERED = 'recovered'
    NEXT_TIER = 'next_tier'
    DEVICE_PROBLEM = 'device_problem'
    FINISHED = 'finished'


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What every line says. A rank leaves these fields to `EventLog.emit`."""

    name: ClassVar[str]

    time: float = 0.0
    """Seconds since the epoch."""
    rank: int = -1
    """Global rank of the process."""
    pid: int = -1
    iteration: int = 0
    """Newest iteration that this rank had committed."""

    def own_fields(self) -> dict[str, Any]:
        """The fields of this kind of event, without those of every line and those not set."""
        own = (name for name in self.__struct_fields__ if name not in Event.__struct_fields__)
        values = ((name, getattr(self, name)) for name in own)
        return {name: value for name, value in values if value is not UNSET}


class WorkerStarted(Event, frozen=True, kw_only=True):
    """A process of this rank begins."""

    name = EventName.WORKER_STARTED

    start_up_s: float = 0.0
    """Since the process was created; a hot spare's waiting is part of it."""


class JobDescribed(Event, frozen=True, kw_only=True):
    """What is trained, how and on what; each process of rank 0 says it."""

    name = EventName.JOB_DESCRIBED

    train_iterations: int | None
    """At which training ends; None: not known at the start."""
    model: str
    layout: dict[str, int]
    """Number of ranks by kind of parallelism."""
    versions: dict[str, str]
    """Versions of what computes, by name."""
    command: list[str]
    """The program and its flags."""


class LossLogged(Event, frozen=True, kw_only=True):
    """The trainer has logged the loss, on the rank that logs; of a loop of one's own, the last."""

    name = EventName.LOSS_LOGGED

    loss: float
    """Mean over the log interval, as it is in the log."""


class Protected(Event, frozen=True, kw_only=True):
    """This process begins to capture: where its rank is, what it holds and keeps."""

    name = EventName.PROTECTED

    node: str
    stage: int
    """Its stage of the pipeline."""
    world_size: int
    copies: int
    """Ranks that hold the same state, this one included."""
    replicas: int
    """Copies of its windows in other failure domains."""
    window: int
    """Iterations of its first one."""
    host_memory: dict[str, int]
    """Bytes reserved, by kind."""
    operators: dict[str, tuple[int, int]]
    """Bytes of each that are captured in full, and as compute weights."""
    experts: list[str]
    """The operators that are experts."""


class WindowCommitted(Event, frozen=True, kw_only=True):
    """This rank has all slots of a window in its own host memory."""

    name = EventName.WINDOW_COMMITTED

    start: int
    """First iteration of the window."""
    plan: str
    """Digest of the plan that cut it into slots."""
    slots: list[int] | UnsetType = UNSET
    """Bytes of the payload of each."""
    training_s: float | UnsetType = UNSET
    """Seconds in iterations since the process began, replays left out."""
    exposed_s: float | UnsetType = UNSET
    """Seconds since then by which sparse checkpointing held up training."""
    copy_bytes_per_s: float | None | UnsetType = UNSET
    """Measured rate of the copies to host memory."""
    send_bytes_per_s: float | None | UnsetType = UNSET
    """Measured rate at which holders of replicas took slots; None before the first."""


class WindowPersisted(Event, frozen=True, kw_only=True):
    """This rank knows that all ranks have a window, with its replicas."""

    name = EventName.WINDOW_PERSISTED

    start: int
    """First iteration of the window."""
    plan: str
    """Digest of the plan that cut it into slots."""


class WindowOnDisk(Event, frozen=True, kw_only=True):
    """This rank knows that all ranks have a window on disk, read back and right."""

    name = EventName.WINDOW_ON_DISK

    start: int
    """First iteration of the window."""
    plan: str
    """Digest of the plan that cut it into slots."""


class Replanned(Event, frozen=True, kw_only=True):
    """All ranks have agreed on another plan."""

    name = EventName.REPLANNED

    origin: int
    """First iteration of the first window of the plan."""
    window: int
    """Iterations per window."""
    version: int
    """Counts the plans of a run."""
    shares: dict[str, float] | UnsetType = UNSET
    """Share of the tokens of its layer, by expert of this rank."""


class ProtectionReduced(Event, frozen=True, kw_only=True):
    """Training goes on with less protection than was asked for."""

    name = EventName.PROTECTION_REDUCED

    reason: str


class FailureDetected(Event, frozen=True, kw_only=True):
    """A living rank leaves its iteration (`reason`), or a new job finds a predecessor's windows."""

    name = EventName.FAILURE_DETECTED

    reason: str | UnsetType = UNSET
    """What has failed; on a living rank."""
    committed: int | UnsetType = UNSET
    """The newest iteration that a rank of the predecessor had committed."""
    windows: int | UnsetType = UNSET
    """How many windows are complete on all ranks; when a job starts again."""


class RecoveryPhase(Event, frozen=True, kw_only=True):
    """This rank enters a phase of a localized recovery."""

    name = EventName.RECOVERY_PHASE

    phase: str


class RecoveryStarted(Event, frozen=True, kw_only=True):
    """This rank goes back, to replay."""

    name = EventName.RECOVERY_STARTED

    start: int
    """First iteration of the window from which it starts."""
    dense_at: int
    """Iteration of the last slot of that window, after which the state is dense."""
    source: str | UnsetType = UNSET
    """Where this rank has the window from: `own memory`, `rank <holder>` or `disk`; not set in a
    localized recovery, which fetches it while it replays."""


class Recovered(Event, frozen=True, kw_only=True):
    """This rank is back, after it replayed or was waited for."""

    name = EventName.RECOVERED

    scope: str | UnsetType = UNSET
    """`localized`, or `global` where all stages went back in processes that live on; not set where
    the whole job was started again, as are the next four."""
    target: int | UnsetType = UNSET
    """The committed iteration from which all ranks go on."""
    stages: list[int] | UnsetType = UNSET
    """Pipeline stages that went back."""
    newcomers: list[int] | UnsetType = UNSET
    """Ranks whose process was replaced."""
    copied: list[int] | UnsetType = UNSET
    """Ranks that took the state of a data-parallel replica."""
    replayed: int
    """Iterations that this rank computed again."""
    verified: int
    """Operators compared with captures newer than the window."""
    verified_at: int
    """The last iteration at which that was possible, -1 if there was none."""
    differing: list[str]
    """Operators whose state was not what it had been, and scalars that came out otherwise."""
    seconds: dict[str, float]
    """By phase, on this rank."""
    iterations: int | UnsetType = UNSET
    """Iterations whose loss, or gradient norm, was compared with what had been recorded of it."""
    went_on: int | UnsetType = UNSET
    """Failures of other stages during its replay, which went on where it was; localized only."""

    @property
    def localized(self) -> bool:
        """Whether the survivors kept their state."""
        return self.scope == 'localized'

    @property
    def by_scope(self) -> dict[str, int]:
        """One recovery, by what went back."""
        return {self.scope if isinstance(self.scope, str) else 'whole-job': 1}


class NextTier(Event, frozen=True, kw_only=True):
    """A recovery gives up what it tried."""

    name = EventName.NEXT_TIER

    reason: str
    tier: str
    """What is tried next."""


class DeviceProblem(Event, frozen=True, kw_only=True):
    """Something is wrong with the GPU of this rank."""

    name = EventName.DEVICE_PROBLEM

    device: str
    """UUID of the GPU."""
    harm: str
    """`noted`, `worn`, `process` or `device`, from bad to worse."""
    what: str


class Finished(Event, frozen=True, kw_only=True):
    """Training is over on this rank."""

    name = EventName.FINISHED

    removed: bool
    """Whether host memory was given back."""


class _Named(msgspec.Struct):
    event: str


_NAME = msgspec.json.Decoder(_Named)


def decode(lines: bytes) -> Iterator[Event]:
    """The events of complete lines; those of unknown names, and a line cut off, are left out.

    A kind is known once its module is imported.

    Raises:
        msgspec.ValidationError: a line is no JSON object, or lacks a field of its kind.
    """
    kinds = {kind.name: kind for kind in Event.__subclasses__()}
    for line in lines.splitlines(keepends=True):
        if line.endswith(b'\n'):
            kind = kinds.get(_NAME.decode(line).event)
            if kind is not None:
                yield msgspec.json.decode(line, type=kind)


def encode(event: Event, rank: int, pid: int, iteration: int = 0) -> bytes:
    """The line of an event, with the present time (seconds since the epoch)."""
    line = {
        'time': time.time(),
        'event': event.name,
        'rank': rank,
        'pid': pid,
        'iteration': iteration,
        **event.own_fields(),
    }
    return msgspec.json.encode(line) + b'\n'


# Every line does so.
_BEGINS = b'{"time":'
# Bytes read at once to find the end of the last whole line.
_TAIL = 1 << 16


def _to_append(path: Path) -> FileIO:
    """Opened behind its last whole line.

    One that SIGKILL, a full file system or a loss of power has cut off would be one line with the
    first of this life, which nobody could read.

    Raises:
        OSError: it cannot be opened, or is no file of events that this user may change.
    """
    file = FileIO(str(path), 'a+', opener=_open_own)
    if file.seekable():
        size = file.seek(0, os.SEEK_END)
        end, whole = size, 0
        while end and not whole:
            begin = max(end - _TAIL, 0)
            newline = os.pread(file.fileno(), end - begin, begin).rfind(b'\n')
            whole = 0 if newline < 0 else begin + newline + 1
            end = begin
        if whole < size:
            _check_cut_off(file, whole)
            file.truncate(whole)
    return file


def _open_own(path: str, flags: int) -> int:
    """Follow no link that another user has put there, perhaps to a file of this user."""
    mode = 0o666
    try:
        return os.open(path, flags | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno != errno.ELOOP or os.lstat(path).st_uid not in (0, os.geteuid()):
            raise
    return os.open(path, flags, mode)


def _check_cut_off(file: FileIO, begin: int) -> None:
    """Only a line of events is taken back; where power was lost, bytes can be zero."""
    found = os.pread(file.fileno(), len(_BEGINS), begin)
    if not (_BEGINS.startswith(found) or found.startswith(b'\0')):
        file.close()
        raise FileExistsError(errno.EEXIST, 'it holds something else than events', str(file.name))


class EventFile:
    """Appends one JSON object per line; a line that is written is there even if the process dies.

    One that it dies in may be cut off, and is taken back by the next that opens the file. Safe to
    call from any thread. A file system that refuses a line (full, gone) ends the file with a
    warning, and nothing else.

    Args:
        path: of the file; its folder is made if need be.

    Raises:
        OSError: it cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file: FileIO | None = _to_append(path)

    def append(self, line: bytes) -> None:
        """Write a line of `encode`."""
        with self._lock:
            if self._file is not None:
                self._write(self._file, line)

    def close(self) -> None:
        """Close the file; what comes later is not written."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, file: FileIO, line: bytes) -> None:
        try:
            if file.write(line) == len(line):  # one system call; SIGKILL may come in its middle
                return
            problem = 'the last line is cut off; is the file system full?'
        except OSError as error:
            problem = str(error)
        logger.warning('no more events are written to %s: %s', file.name, problem)
        file.close()
        self._file = None


class EventLog:
    """The events of a rank. Safe to call from any thread; never ends training (invariant I6).

    Args:
        directory: `--sparse-ckpt-events`, or None: nothing is written.
        rank: global rank of this process.
        required: refuse a directory that cannot be written to; else there is a warning. Whoever
            joins a running job is needed more than its events are.

    Attributes:
        iteration: the newest one that this rank has committed.
        recoveries: how many this process has come through.
        listeners: called with every event, by the thread that emits it; they must not fail.

    Raises:
        UserError: the directory cannot be written to.
    """

    def __init__(self, directory: str | None, rank: int, required: bool = True) -> None:
        self._rank = rank
        self._file: EventFile | None = None
        self.iteration = 0
        self.recoveries = 0
        self.listeners: list[Callable[[Event], None]] = []
        if directory is not None:
            try:
                self._file = EventFile(Path(directory) / f'rank{rank}.jsonl')
            except OSError as error:
                said = f'--sparse-ckpt-events {directory}: events cannot be written there: {error}.'
                if required:
                    raise UserError(
                        f'{said} Give a directory that this user can write to, or leave the flag '
                        'out.'
                    ) from error
                logger.warning('sparse checkpointing: rank %d goes on without: %s', rank, said)

    def emit(self, event: Event) -> None:
        """Write one event with time (seconds since the epoch), rank, pid and iteration."""
        if self._file is not None:
            self._file.append(encode(event, self._rank, os.getpid(), self.iteration))
        self.recoveries += isinstance(event, Recovered)
        for listener in self.listeners:
            listener(event)

    def close(self) -> None:
        """Close the file; what comes later is not written."""
        if self._file is not None:
            self._file.close()
