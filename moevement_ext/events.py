# SPDX-License-Identifier: Apache-2.0
"""Events of a run as JSON lines, one file per rank: their classes, writer, reader and file.

A line has the fields of `Event`, the event's name, and the fields of its class. Launchers write
their own events (`launch/launcher_events.py`) to a separate file.
"""

import errno
import json
import math
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from moevement_ext.errors import UserError
from moevement_ext.logger import logger_of

logger = logger_of(__name__)

# Beginning of every line.
_BEGINS = b'{"time":'
# Bytes read at once to find the end of the last whole line.
_TAIL = 1 << 16
# Pause after an error that may be temporary, such as a full file system.
_PAUSE_S = 60.0


def probe(directory: Path) -> os.stat_result:
    """Raise `OSError` unless files, or the directory itself, could be created; creates nothing.

    Returns the status of a file that was created with mode 0600 for a moment.
    """
    while not directory.exists():
        directory = directory.parent
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno())
    except OSError as error:  # without the name of the file, which differs between ranks
        raise OSError(error.errno, error.strerror, str(directory)) from error


def _to_append(path: Path) -> FileIO:
    """Open a file for appending after its last complete line.

    A line truncated by SIGKILL, a full file system or a power loss would merge with the first
    new line, and neither would be readable. Raises `OSError` if the file cannot be opened, or
    is no event file that this user may change.
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
    """Open without following links, which another user may have placed."""
    mode = 0o666
    try:
        return os.open(path, flags | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno != errno.ELOOP or os.lstat(path).st_uid not in (0, os.geteuid()):
            raise
    return os.open(path, flags, mode)


def _check_cut_off(file: FileIO, begin: int) -> None:
    """Check that the cut-off bytes are part of an event, or zeros after a power loss."""
    found = os.pread(file.fileno(), len(_BEGINS), begin)
    if not (_BEGINS.startswith(found) or found.startswith(b'\0')):
        file.close()
        raise FileExistsError(errno.EEXIST, 'it holds something else than events', str(file.name))


class EventFile:
    """Appends one JSON object per line; a written line survives the death of the process.

    The next process that opens the file removes a truncated last line. Creates the directory.
    Thread-safe. If a write fails, a warning is logged and the lines of the next minute are dropped;
    training continues. Raises `OSError` if the file is not writable.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._path = path
        self._file: FileIO | None = _to_append(path)
        self._again_at = 0.0
        self._failed = False

    def append(self, line: bytes) -> None:
        with self._lock:
            try:
                if self._file is None and time.monotonic() >= self._again_at:
                    self._file = _to_append(self._path)
                if self._file is not None:
                    self._write(self._file, line)
            except OSError as error:
                self._pause(error)

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        with self._lock:
            self._again_at = math.inf
            self._close()

    def _write(self, file: FileIO, line: bytes) -> None:
        if file.write(line) != len(line):  # one system call; SIGKILL may interrupt it
            raise OSError('the last line is cut off; is the file system full?')
        self._failed = False

    def _pause(self, error: OSError) -> None:
        """Drop lines for a while, not for the rest of a job that may run for weeks."""
        if not self._failed:
            self._failed = True
            logger.warning('events are not written to %s at present: %s', self._path, error)
        self._close()
        self._again_at = time.monotonic() + _PAUSE_S

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # some file systems report only now that they are full
                file.close()


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every line. `EventLog.emit` fills them in a rank."""

    name: ClassVar[str]
    """The class name in snake case, as files have it: a renamed class is another event."""
    kinds: ClassVar[dict[str, type['Event']]] = {}
    """All classes of events by name."""

    time: float = 0.0
    """Seconds since the epoch."""
    rank: int = -1
    """Global rank of the process."""
    pid: int = -1
    iteration: int = 0
    """Newest iteration committed on this rank."""

    def __init_subclass__(cls) -> None:
        cls.name = re.sub('(?<!^)(?=[A-Z])', '_', cls.__name__).lower()
        cls.kinds[cls.name] = cls

    def own_fields(self) -> dict[str, Any]:
        """The fields of this event class, without the fields of every line."""
        own = (name for name in self.__struct_fields__ if name not in Event.__struct_fields__)
        return {name: getattr(self, name) for name in own}


class WorkerStarted(Event, frozen=True, kw_only=True):
    """A process of this rank started."""

    start_up_s: float = 0.0
    """Seconds since the process was created, including a hot spare's wait."""


class JobDescribed(Event, frozen=True, kw_only=True):
    """Description of the job: model, flags, hardware. Each process of rank 0 emits it."""

    train_iterations: int | None
    """Iteration at which training ends; None if unknown at the start."""
    model: str
    layout: dict[str, int]
    """Number of ranks by kind of parallelism."""
    versions: dict[str, str]
    """Versions of the computing packages, by name."""
    command: list[str]
    """The program and its flags."""


class LossLogged(Event, frozen=True, kw_only=True):
    """The loss of an iteration that ends a log interval, on the last rank."""

    loss: float | None
    """Mean over the batch, in a custom loop over this rank's part; None: not finite, which JSON
    lacks."""

    @property
    def finite(self) -> int:
        """1 if the loss is a finite number, else 0."""
        return int(self.loss is not None and math.isfinite(self.loss))


class Protected(Event, frozen=True, kw_only=True):
    """This process begins to capture; describes its place in the job and its memory."""

    node: str
    stage: int
    """Pipeline stage of the rank."""
    world_size: int
    copies: int
    """Number of ranks with the same state, this one included."""
    replicas: int
    """Number of copies of the rank's windows in other failure domains."""
    window: int
    """Iterations in the first window."""
    host_memory: dict[str, int]
    """Bytes reserved, by kind."""
    operators: dict[str, tuple[int, int]]
    """Bytes of each operator captured in full, and as compute weights."""
    experts: list[str]
    """The operators that are experts."""
    strategy: str
    """`--sparse-ckpt-strategy`."""
    interval: int
    """Iterations from one window to the next; more than `window` if not all are captured."""


class WindowCommitted(Event, frozen=True, kw_only=True):
    """All slots of a window are in this rank's own host memory."""

    start: int
    """First iteration of the window."""
    plan: str
    """Its history, and the digest of the plan that cut it into slots."""
    slots: list[int]
    """Payload bytes of each slot."""
    training_s: float
    """Seconds in iterations since the start of the process, without replays."""
    exposed_s: float
    """Seconds by which sparse checkpointing delayed training since the start of the process."""
    copy_bytes_per_s: float | None
    """Measured rate of the copies to host memory."""
    send_bytes_per_s: float | None
    """Measured send rate to holders of replicas; None before the first send."""
    helpers_s: float
    """CPU seconds of this process's Python threads, except the training thread, since their
    start."""
    own_s: float = 0.0
    """Seconds of `training_s` without waits for other ranks and for checkpointing."""
    waits_s: dict[str, float] = {}
    """Seconds of `training_s` in waits, by the rank waited for; `group`: for several."""


class WindowPersisted(Event, frozen=True, kw_only=True):
    """This rank has learned that all ranks have a window, with its replicas."""

    start: int
    """First iteration of the window."""
    plan: str
    """Digest of the plan that cut it into slots."""


class WindowOnDisk(Event, frozen=True, kw_only=True):
    """This rank learned that all ranks have a verified copy of a window on disk."""

    start: int
    """First iteration of the window."""
    plan: str
    """Digest of the plan that cut it into slots."""


class Replanned(Event, frozen=True, kw_only=True):
    """All ranks agreed on a new plan."""

    origin: int
    """First iteration of the first window of the plan."""
    window: int
    """Iterations per window."""
    version: int
    """Sequence number of the plan in the run."""
    shares: dict[str, float]
    """Share of the layer's tokens, by expert on this rank."""
    interval: int
    """Iterations from one window to the next; more than `window` if not all are captured."""


class SlowRank(Event, frozen=True, kw_only=True):
    """Rank 0 learned that a rank is slow, is slower or faster than told, or is slow no more."""

    slow: int
    """The slow rank."""
    node: str
    ratio: float
    """Its own seconds per iteration, by the median of its pipeline stage."""
    iterations: int
    """For how many it has been slow, at least; 0: it is no more."""


class ProtectionReduced(Event, frozen=True, kw_only=True):
    """Training continues with less protection than requested."""

    reason: str


class DenseSaveFailed(Event, frozen=True, kw_only=True):
    """The trainer could not write its dense checkpoint of `iteration`, and training goes on."""

    iteration: int
    reason: str


class FailureDetected(Event, frozen=True, kw_only=True):
    """A living rank aborts its iteration (`reason`), or a new job finds earlier windows."""

    reason: str | None = None
    """The failure, on a living rank; None at a restart of the job."""
    committed: int | None = None
    """At a restart: the newest iteration that a rank of the earlier job had committed."""
    windows: int | None = None
    """At a restart: the number of windows complete on all ranks."""


class RecoveryPhase(Event, frozen=True, kw_only=True):
    """This rank enters a phase of a localized recovery."""

    phase: str


class RecoveryStarted(Event, frozen=True, kw_only=True):
    """This rank rolls back and replays."""

    start: int
    """First iteration of the window from which it starts."""
    dense_at: int
    """Iteration of the last slot of that window, after which the state is dense."""
    source: str | None = None
    """Source of this rank's window: `own memory`, `rank <holder>` or `disk`; None in a localized
    recovery, which fetches the window during the replay."""


class Resharded(Event, frozen=True, kw_only=True):
    """This rank assembled its part of a window from the windows of another layout."""

    start: int
    """First iteration of the window."""
    dense_at: int
    """Iteration of the last slot of the window."""
    was: str
    """The layout that captured the window."""
    local_bytes: int
    """Bytes read on this node, or from a disk that it can access."""
    remote_bytes: int
    """Bytes read from other ranks."""
    seconds: float


class Recovered(Event, frozen=True, kw_only=True):
    """This rank has finished a recovery, by a replay or by waiting for other ranks."""

    scope: str = 'whole-job'
    """`localized`, or `global` if all stages rolled back in living processes. `whole-job` has
    the defaults of the next four fields."""
    target: int | None = None
    """The committed iteration from which all ranks continue."""
    stages: list[int] = []
    """Pipeline stages that rolled back."""
    replacements: list[int] = []
    """Ranks with a replaced process."""
    copied: list[int] = []
    """Ranks that copied the state of a data-parallel replica."""
    replayed: int
    """Iterations that this rank recomputed."""
    verified: int
    """Operators compared with captures newer than the window."""
    verified_at: int
    """The last iteration with such a comparison, -1 if there was none."""
    differing: list[str]
    """Operators and scalars that differ from the state before the failure."""
    seconds: dict[str, float]
    """Seconds by phase, on this rank."""
    iterations: int
    """Iterations whose loss or gradient norm was compared with the ledger."""
    went_on: int = 0
    """Failures of other stages that this rank's replay survived; localized only."""

    @property
    def localized(self) -> bool:
        """True if the survivors kept their state."""
        return self.scope == 'localized'

    @property
    def by_scope(self) -> dict[str, int]:
        """Count one recovery under its scope."""
        return {self.scope: 1}

    @property
    def total_s(self) -> float:
        """Seconds of all phases, on this rank."""
        return sum(self.seconds.values())


class TokensLost(Event, frozen=True, kw_only=True):
    """Expert updates that this rank's state lacks after a recovery of a lossy strategy.

    Counts tokens of this rank's micro-batches, once for each expert that they were routed to; the
    sum over all ranks is the total of the job.
    """

    start: int
    """Iteration to which all ranks rolled back."""
    versions: dict[str, int]
    """Iteration of the state of each expert of the stage, at most `start`."""
    tokens: float
    """Tokens whose expert updates this recovery lost."""
    lost: float
    """Tokens lost in all recoveries that led to this state, including this one."""
    share: float
    """`lost` as a share of all tokens of the training (PLT)."""


class NextTier(Event, frozen=True, kw_only=True):
    """A recovery abandons one source of windows and tries the next."""

    reason: str
    tier: str
    """The source that is tried next."""


class DeviceProblem(Event, frozen=True, kw_only=True):
    """The GPU of this rank is unusable before a reset, a reboot of its node, or a repair."""

    device: str
    """UUID of the GPU."""
    harm: str = 'device'
    """Always `device`; files of earlier versions also have `noted`, `worn` and `process`."""
    what: str


class Finished(Event, frozen=True, kw_only=True):
    """Training has ended on this rank."""

    removed: bool
    """True if the host memory was freed."""


class _Named(msgspec.Struct):
    event: str


# Seconds for which an event waits for the thread that writes another one.
_TO_WRITE_S = 1.0
# Events of windows that a rank writes in a row, of each kind, and the seconds after which it may
# write another: windows of short iterations would fill the disk with GB a day. Their figures are
# sums since the start of the process, so that readers lose nothing.
_WINDOWS_IN_A_ROW = 1000
WINDOW_EVERY_S = 1.0

_NAME = msgspec.json.Decoder(_Named)


def decode(lines: bytes) -> Iterator[Event]:
    """Decode complete lines; skips events of unknown names, and a truncated last line.

    An event name is known once the module of its class is imported. Raises
    `msgspec.ValidationError` if a line is not a JSON object, or lacks a field of its class.
    """
    for line in lines.splitlines(keepends=True):
        if line.endswith(b'\n'):
            kind = Event.kinds.get(_NAME.decode(line).event)
            if kind is not None:
                yield msgspec.json.decode(line, type=kind)


def encode(event: Event, rank: int, pid: int, iteration: int = 0) -> bytes:
    """Encode an event as a line, with the current time (seconds since the epoch)."""
    line = {
        'time': time.time(),
        'event': event.name,
        'rank': rank,
        'pid': pid,
        'iteration': iteration,
        **event.own_fields(),
    }
    return _encoded(line)


def _encoded(line: Mapping[str, Any]) -> bytes:
    """One line of JSON; bytes of a path that are not UTF-8 become question marks."""
    try:
        return msgspec.json.encode(line) + b'\n'
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(line, str_keys=True)
        text = json.dumps(plain, ensure_ascii=False, separators=(',', ':'))
        return text.encode(errors='replace') + b'\n'


def require_writable(directory: str) -> None:
    """Check as `EventLog` does, with a `UserError`, but create nothing."""
    try:
        probe(Path(directory))
    except OSError as error:
        raise _unwritable(directory, error) from error


def _unwritable(directory: str, error: OSError) -> UserError:
    return UserError(
        f'--sparse-ckpt-events {directory}: events cannot be written there: {error}. Give a '
        'directory that this user can write to, or leave the flag out.'
    )


class EventLog:
    """Writes the events of a rank, in order of time. Thread-safe.

    No error ends training (invariant I6).

    Args:
        directory: `--sparse-ckpt-events`; None: no events are written.
        rank: global rank of this process.
        required: raise `UserError` if the directory is not writable; otherwise only warn, as for a
            process that joins a running job.

    Attributes:
        iteration: the newest iteration committed on this rank.
        recoveries: number of recoveries of this process.
        listeners: called with every event, on the emitting thread; they must not raise.
    """

    def __init__(self, directory: str | None, rank: int, required: bool = True) -> None:
        self._rank = rank
        self._in_turn = threading.Lock()
        self._hangs = False
        # Time until which events of windows are written already, by kind.
        self._written_until: dict[type[Event], float] = {}
        self._file: EventFile | None = None
        self.iteration = 0
        self.recoveries = 0
        self.listeners: list[Callable[[Event], None]] = []
        if directory is not None:
            try:
                self._file = EventFile(Path(directory) / f'rank{rank}.jsonl')
            except OSError as error:
                unwritable = _unwritable(directory, error)
                if required:
                    raise unwritable from error
                logger.warning('rank %d goes on without: %s', rank, unwritable)

    def emit(self, event: Event) -> None:
        """Write one event with time (seconds since the epoch), rank, pid and iteration.

        If windows are shorter than a second, listeners also get events that are not written.
        """
        if self._file is not None:
            self._write(self._file, event)
        self.recoveries += isinstance(event, Recovered)
        for listener in self.listeners:
            listener(event)

    def reduced(self, reason: str) -> None:
        """Emit and log that protection is reduced. Any thread."""
        logger.warning('protection is reduced: %s', reason)
        self.emit(ProtectionReduced(reason=reason))

    def _write(self, file: EventFile, event: Event) -> None:
        """Write one event at a time, so that lines are in the order of their times.

        A file system that does not answer blocks one thread; the events of other threads are
        dropped.
        """
        if not self._in_turn.acquire(timeout=0.0 if self._hangs else _TO_WRITE_S):
            if not self._hangs:
                self._hangs = True
                logger.warning(
                    'the file system of --sparse-ckpt-events does not answer: events of rank %d '
                    'are lost until it does',
                    self._rank,
                )
            return
        try:
            self._hangs = False
            if self._is_due(type(event)):
                file.append(encode(event, self._rank, os.getpid(), self.iteration))
        finally:
            self._in_turn.release()

    def _is_due(self, kind: type[Event]) -> bool:
        if kind not in (WindowCommitted, WindowPersisted):
            return True
        now = time.monotonic()
        earliest = now - (_WINDOWS_IN_A_ROW - 1) * WINDOW_EVERY_S
        until = max(self._written_until.get(kind, earliest), earliest)
        if until > now:
            return False
        self._written_until[kind] = until + WINDOW_EVERY_S
        return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
