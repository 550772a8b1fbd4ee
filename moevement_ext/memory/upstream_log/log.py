# SPDX-License-Identifier: Apache-2.0
"""The upstream log: tensors sent to neighbour stages, kept for their replay (paper sec. 3.4).

A lost stage replays from the logs of its neighbours, so that no other stage recomputes anything.
Each stage keeps, in host memory, the activations that it sent downstream and the gradients that it
sent upstream, back to the oldest window that a recovery may start from.

Records lie in a ring in sending order. The log drops them oldest first (a newer window is
persisted, or the ring is full) or newest first (a rollback). One worker thread, or one CUDA stream,
fills the records in order. Bytes that arrive late for a dropped record are therefore overwritten by
the record that took its place, before the new record counts as complete.
"""

import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from moevement_ext.errors import HostMemoryError
from moevement_ext.logger import logger_of
from moevement_ext.memory.device import bind_thread, side_stream, with_index
from moevement_ext.memory.file_system import gib
from moevement_ext.memory.tensors import dtype_name
from moevement_ext.memory.upstream_log.record import Direction, LogGap, LoggedTensor, LogKey
from moevement_ext.memory.upstream_log.ring import Ring, RingMap

logger = logger_of(__name__)

# Seconds between checks whether a wait for room cannot help.
_POLL_S = 0.05


class _Record:
    """Place of one tensor in the ring; `logged` is None until all its bytes have arrived."""

    def __init__(self, key: LogKey, offset: int, source: torch.Tensor) -> None:
        self.key = key
        self.span = slice(offset, offset + source.nbytes)
        self.dtype = source.dtype
        self.shape = tuple(source.shape)
        self.logged: LoggedTensor | None = None


class _Completion(NamedTuple):
    """A record to complete. `source` lives exactly until its bytes have arrived."""

    record: _Record
    source: torch.Tensor
    arrive: Callable[[], object]
    """Returns when the bytes are in the ring; keeps the target map alive."""


class _Shrunk(NamedTuple):
    """Queued after all earlier completions once the ring has become smaller."""


class UpstreamLog:
    """Records of all tensors sent in the iterations from `first_iteration` on.

    The training thread calls `append`, `rewind`, `pause` and `close`; any thread calls the
    rest. The index lives in this process, so the log ends with the process; the file of an
    earlier process is overwritten. Raises `HostMemoryError` if there is no space for the file,
    an existing file is not this user's own, or CUDA cannot pin the file.

    Args:
        path: file in a tmpfs, in a directory that no other process uses.
        capacity_bytes: size of the ring; a record takes `record.region_bytes` of it.
        device: of the tensors.
        max_wait_s: longest time that one `append` blocks training because the ring is full.
        on_degraded: called with a reason, on the training or the worker thread, when localized
            recovery is impossible for a while, or the log blocks training.
    """

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        device: torch.device,
        max_wait_s: float,
        on_degraded: Callable[[str], None],
    ) -> None:
        self.path = path
        self._device = with_index(device)
        self._cuda = device.type == 'cuda'
        self._map = RingMap.of_size(path, capacity_bytes, self._cuda)
        self.array = self._map.array
        if self._cuda:
            self._stream = side_stream(self._device)
            self._computed = torch.cuda.Event()
        self._max_wait_s = max_wait_s
        self._on_degraded = on_degraded
        self._ring = Ring(capacity_bytes)
        self._records: OrderedDict[LogKey, _Record] = OrderedDict()  # in the order of the ring
        self._first: int | None = None
        self._iteration: int | None = None  # of the newest append
        self._counts: Counter[Direction] = Counter()  # of that iteration
        self._paused = False
        self._waited_in_vain = False
        self.in_vain: Callable[[], bool] = lambda: False
        """True once the wait for room cannot help, as a rank is lost."""
        self._forgetting = False
        self._closed = False
        self._resizing = threading.Lock()
        self._changed = threading.Condition()
        self._jobs: queue.Queue[_Completion | _Shrunk | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name='upstream-log', daemon=True)
        self._thread.start()

    # Logging

    def append(self, iteration: int, direction: Direction, tensor: torch.Tensor) -> None:
        """Log a tensor of any shape right before its send, as the next record of its direction.

        The copy is asynchronous. The log keeps the storage alive until then, also when the caller
        replaces `tensor.data`; no code may write to it before. If the log cannot keep the tensor,
        it drops this iteration and all older ones. Raises `ValueError` for an iteration older than
        the last one, without a `rewind` in between.
        """
        source = tensor.detach()  # shares the storage, but not a later change of `.data`
        self._await_room(iteration, source.nbytes)
        record = self._reserve(iteration, direction, source)
        if record is None:
            return
        try:
            arrive = self._begin_copy(source, record.span)
        except Exception as error:  # logging must not fail training (invariant I6)
            self._give_up(record, error)
            return
        self._jobs.put(_Completion(record, source, arrive))

    def drop_until(self, iteration: int) -> None:
        """Drop the records up to and including `iteration`, which no recovery needs."""
        with self._changed:
            if self._first is not None and iteration >= self._first:
                self._drop_oldest(iteration)
                self._waited_in_vain = False
                self._forgetting = False

    def rewind(self, iteration: int) -> None:
        """Drop the records after `iteration`, as training recomputes the later iterations."""
        self.drain()
        with self._changed:
            self._paused = False
            if self._first is None or self._iteration is None or self._iteration <= iteration:
                return
            while self._records and next(reversed(self._records)).iteration > iteration:
                self._records.popitem()
                self._ring.free_newest()
            # All iterations from the next one on are logged again, including those given up before.
            self._first = min(self._first, iteration + 1)
            self._iteration = iteration
            self._counts = Counter(
                key.direction for key in self._records if key.iteration == iteration
            )

    def pause(self) -> None:
        """Note that no tensor is sent until the next `append` or `rewind`: readers do not wait."""
        with self._changed:
            self._paused = True
            self._changed.notify_all()

    def grow(self, capacity_bytes: int) -> None:
        """Enlarge the ring to at least this size; records stay. Any thread.

        On a GPU the caller's current device must be set (`bind_thread`), to pin the ring.
        Raises `HostMemoryError` if there is no room, or CUDA cannot pin the ring, and `OSError`
        if the file was removed: a new one would lack the records. The log does not change then.
        """
        with self._resizing:
            with self._changed:
                if capacity_bytes <= self._ring.capacity:
                    self._ring.limit = max(self._ring.limit, capacity_bytes)
                    return
            larger = RingMap.of_size(self.path, capacity_bytes, self._cuda, create=False)
            with self._changed:
                self._use(larger)
                self._ring.resize(capacity_bytes)

    def shrink(self, capacity_bytes: int) -> None:
        """Shrink the ring to this size once no record lies beyond it. Any thread.

        Records stay, and as many fit as in a ring of this size. The ring shrinks in a later
        `append`; the worker thread then frees the pages.
        """
        with self._changed:
            self._ring.limit = min(capacity_bytes, self._ring.capacity)

    # Reading

    @property
    def first_iteration(self) -> int | None:
        """Oldest iteration with all its records; None if nothing is logged."""
        with self._changed:
            return self._first

    def read(self, key: LogKey, timeout_s: float) -> tuple[LoggedTensor, bytes] | None:
        """Wait at most `timeout_s` for a record and copy its bytes. Any thread.

        None: it may arrive later, if this stage replays too. Raises `LogGap` if it never will.
        """
        expires = time.monotonic() + timeout_s
        while (record := self._await_record(key, expires - time.monotonic())) is not None:
            # Readers do not block training: a record that is still in the index after the copy was
            # not overwritten during the copy.
            data = self._copied(record)
            with self._changed:
                if self._records.get(key) is record and record.logged is not None:
                    return record.logged, data
        return None

    def _copied(self, record: _Record) -> bytes:
        """Copy the bytes at the record's offset; a newer record may have overwritten them."""
        with self._changed:
            array, used = self.array, self._map
            used.readers += 1
        try:
            return array[record.span].tobytes()
        finally:
            with self._changed:
                used.readers -= 1
                if used is not self._map:
                    self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all appended records are complete and their tensors are released."""
        self._jobs.join()

    def close(self) -> None:
        """Complete the appended records and end the worker thread; readers get `LogGap`.

        Later appends are ignored. The file stays; the map is freed with this object.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._jobs.put(None)
        self._thread.join()

    # On the training thread

    def _await_room(self, iteration: int, nbytes: int) -> None:
        """Wait, up to a limit, for `drop_until` to make room; only the training thread takes room.

        After a timeout, appends do not wait before the next `drop_until`: a log that is too small,
        or windows that are never persisted, must not slow down every iteration.
        """
        with self._changed:
            if self._waited_in_vain or not self._room_may_come(iteration, nbytes):
                return
        self._report(
            f'{self._description} is full: training waits up to {self._max_wait_s:g} s for the '
            f'next window to be persisted. Enlarge the log if this is seen again'
        )
        deadline = time.monotonic() + self._max_wait_s
        with self._changed:
            while self._room_may_come(iteration, nbytes):
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self.in_vain():
                    self._waited_in_vain = True
                    return
                self._changed.wait(min(remaining, _POLL_S))

    def _room_may_come(self, iteration: int, nbytes: int) -> bool:
        if self._closed or nbytes > self._ring.capacity or self._ring.fits(nbytes):
            return False
        return self._oldest_iteration(iteration) < iteration

    def _oldest_iteration(self, default: int) -> int:
        return next(iter(self._records)).iteration if self._records else default

    def _reserve(
        self, iteration: int, direction: Direction, source: torch.Tensor
    ) -> _Record | None:
        with self._changed:
            key = self._next_key(iteration, direction)
            self._paused = False
            first = self._first
            record = self._place(key, source)
            if self._ring.shrink():  # on this thread: all copies begun are in the queue
                self._jobs.put(_Shrunk())
            forgotten = self._first != first
            reported = self._forgetting  # report once per regular drop
            self._forgetting = reported or forgotten
        if forgotten and not reported:
            self._report(f'{self._description} is full: {self._consequence}')
        return record

    def _next_key(self, iteration: int, direction: Direction) -> LogKey:
        if self._iteration is None or self._first is None:
            self._first = self._iteration = iteration
        elif iteration < self._iteration:
            raise ValueError(
                f'iteration {iteration} is logged after iteration {self._iteration}; '
                f'a rollback must rewind the log first'
            )
        if iteration > self._iteration:
            self._iteration = iteration
            self._counts.clear()
        key = LogKey(iteration, direction, self._counts[direction])
        self._counts[direction] += 1
        return key

    def _place(self, key: LogKey, source: torch.Tensor) -> _Record | None:
        """Find room, if necessary by dropping the oldest whole iterations."""
        while not self._closed and self._first is not None and key.iteration >= self._first:
            offset = self._ring.allocate(source.nbytes)
            if offset is not None:
                record = self._records[key] = _Record(key, offset, source)
                return record
            self._drop_oldest(self._oldest_iteration(key.iteration))
        return None

    def _begin_copy(self, source: torch.Tensor, span: slice) -> Callable[[], object]:
        mapped = self._map
        target = mapped.bytes[span].view(source.dtype).view(source.shape)
        if not self._cuda:
            return partial(target.copy_, source)
        # The worker keeps the source until the event is done, so the allocator cannot reuse its
        # memory earlier: no record_stream is necessary.
        copied = torch.cuda.Event(blocking=True)
        self._computed.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._computed)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copied.record()
        return partial(_arrived, copied, mapped)

    # On the worker thread

    def _work(self) -> None:
        bind_thread(self._device)
        going_on = True
        while going_on:
            try:
                going_on = self._carry_out_next()
            except Exception:  # logging must not fail training (invariant I6)
                logger.exception('%s', self._description)
            finally:
                self._jobs.task_done()  # the training thread waits for it in `drain`

    def _carry_out_next(self) -> bool:
        """Wait for the next job, and do it; False at the end."""
        job = self._next_arrived()
        if isinstance(job, _Shrunk):
            self._give_back()
        elif job is not None:
            try:
                self._complete(job)
            except Exception as error:  # treated as a failed copy
                self._give_up(job, error)
        return job is not None

    def _next_arrived(self) -> _Record | _Shrunk | None:
        """Wait for the next job and, if it is a record, for its bytes; None at the end.

        Returning frees the source tensor; on a GPU, checksums may lag far behind the sends.
        """
        job = self._jobs.get()
        if not isinstance(job, _Completion):
            return job
        try:
            job.arrive()
        except Exception as error:  # logging must not fail training (invariant I6)
            self._give_up(job.record, error)
        return job.record

    def _complete(self, record: _Record) -> None:
        with self._changed:
            if self._records.get(record.key) is not record:
                return  # the record has failed, or was dropped meanwhile
        data = self.array[record.span]
        checksum = xxhash.xxh3_64_intdigest(memoryview(data))
        logged = LoggedTensor(dtype_name(record.dtype), record.shape, data.size, checksum)
        with self._changed:
            record.logged = logged
            self._changed.notify_all()

    def _give_back(self) -> None:
        with self._resizing:
            former, capacity = self._map, self._ring.capacity
            if capacity >= former.array.size:
                return  # the ring has grown again
            try:
                smaller = former.first(capacity)
            except (HostMemoryError, OSError, ValueError) as error:  # only space is lost (I6)
                logger.warning('%s keeps its pages: %s', self._description, error)
                return
            with self._changed:
                self._use(smaller)
                self._changed.wait_for(lambda: not former.readers)
            former.give_back(capacity)

    # On any thread

    def _use(self, mapped: RingMap) -> None:
        """Switch to another map of the same pages; copies keep the old one. Needs the lock."""
        self._map, self.array = mapped, mapped.array
        self._changed.notify_all()

    def _give_up(self, record: _Record, error: Exception) -> None:
        """Drop a failed record, so that no reader waits for it."""
        with self._changed:
            if self._records.get(record.key) is not record:
                return  # dropped meanwhile
            self._drop_oldest(record.key.iteration)
        self._report(f'{self._description} has failed ({error}): {self._consequence}')

    def _drop_oldest(self, iteration: int) -> None:
        while self._oldest_iteration(iteration + 1) <= iteration:
            self._records.popitem(last=False)
            self._ring.free_oldest()
        self._first = iteration + 1
        self._changed.notify_all()

    def _await_record(self, key: LogKey, timeout_s: float) -> _Record | None:
        with self._changed:
            self._changed.wait_for(lambda: self._complete_record(key) or self._gap(key), timeout_s)
            gap = self._gap(key)
            if gap is not None:
                raise LogGap(f'{self.path}: {gap}')
            return self._complete_record(key)

    def _complete_record(self, key: LogKey) -> _Record | None:
        record = self._records.get(key)
        return record if record is not None and record.logged is not None else None

    def _gap(self, key: LogKey) -> str | None:
        if self._closed:
            return 'the log is closed'
        if self._first is not None and key.iteration < self._first:
            return f'iteration {key.iteration} is gone, the log begins with {self._first}'
        over = self._iteration is not None and key.iteration < self._iteration
        if (over or self._paused) and key not in self._records:
            return f'there is no {key}; sender and receiver follow different schedules'
        return None

    @property
    def _description(self) -> str:
        return f'upstream log {self.path.name} ({gib(self._ring.capacity)})'

    @property
    def _consequence(self) -> str:
        first = self.first_iteration
        return (
            f'iterations before {first} are forgotten, so localized recovery is impossible until '
            f'a window that starts with iteration {(first or 0) - 1} or later is persisted'
        )

    def _report(self, reason: str) -> None:
        try:
            self._on_degraded(reason)
        except Exception:  # neither training nor the worker may end because a callback fails
            logger.exception('%s', reason)


def _arrived(copied: torch.cuda.Event, mapped: RingMap) -> None:
    """Wait for a copy; its pages stay registered until then, with their map."""
    copied.synchronize()
