# SPDX-License-Identifier: Apache-2.0
"""Interruptible waits: for a call on a thread of its own, and for any gloo operation.

Closing the connections of a backend makes every operation raise that has not moved a byte. A
connection forgets its half-transferred operation (gloo's `Pair::signalException` handles queued
operations only), and `Work.wait` would last until the group's timeout, minutes by default. So this
module replaces `Work.wait` by a wait that polls for an interruption. An abandoned operation keeps
its tensors and a thread until the group's timeout.

Each wait is timed. On a GPU the thread only queues operations, and two events around an exchange
between stages, or around the reduction of the gradients, tell how long the stream was held up
there. They are read once the device has passed them, so that nothing ever waits for them.
"""

import math
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import cast

import torch
from torch._C._distributed_c10d import OpType, Work  # type: ignore[attr-defined]
from torch.distributed import DistNetworkError

PARTS: dict[str, tuple[str, ...]] = {
    '_C._distributed_c10d': ('OpType', 'Work'),
    '_C._distributed_c10d.Work': ('_get_op_type', 'wait', 'is_completed'),
}
"""Private parts of torch used here (see `internals.check`). Checked against torch 2.15."""

_POLL_S = 0.1
_SLICE = timedelta(seconds=0.25)
# Kinds of work without short waits: a timeout closes the connections (the first three), or the work
# supports no timeout. Composite works, such as reduce-scatter, have an unknown kind.
_WITHOUT_SLICES = frozenset(
    int(kind) for kind in (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE, OpType.UNKNOWN)
)

_GROUP = 'group'

_torch_wait = Work.wait
_ended = threading.Event()
_idle: list['_Caller'] = []


class Waited:
    """Seconds of waits by the rank that was waited for; `group`: several. Training thread only."""

    def __init__(self) -> None:
        self.begin(on_gpu=False)

    def begin(self, on_gpu: bool) -> None:
        """Count from now on, for the calling thread, or for its stream."""
        self._on_gpu = on_gpu
        self._thread = threading.get_ident()
        self._waits_for = _GROUP
        self._seconds: dict[str, float] = defaultdict(float)
        self._passing = deque[tuple[str, torch.cuda.Event, torch.cuda.Event]]()

    @contextmanager
    def waiting_for(self, rank: int | None) -> Iterator[None]:
        """Within the context, operations wait for `rank`; None: for a group."""
        before, self._waits_for = self._waits_for, _GROUP if rank is None else str(rank)
        began = self._event()
        try:
            yield
        finally:
            ended = self._event()
            if began is not None and ended is not None:
                self._passing.append((self._waits_for, began, ended))
            self._waits_for = before

    def timed[T](self, wait: Callable[[], T]) -> T:
        """Call `wait`, which blocks the calling thread, and count its seconds."""
        if self._on_gpu or threading.get_ident() != self._thread:
            return wait()
        began = time.perf_counter()
        try:
            return wait()
        finally:
            self._seconds[self._waits_for] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Seconds that became known since the last call; never waits for the device."""
        while self._passing and self._passing[0][2].query():
            rank, began, ended = self._passing.popleft()
            self._seconds[rank] += began.elapsed_time(ended) / 1000
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken

    def _event(self) -> torch.cuda.Event | None:
        """An event of the current stream; None on a CPU, and while a graph is recorded."""
        if not self._on_gpu or torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


waited = Waited()
"""The waits of this process."""


def in_time[T](
    call: Callable[[], T],
    limit_s: float,
    check: Callable[[], None] = lambda: None,
    late: str = 'the store has not answered',
) -> T:
    """Return or raise as `call` does; `DistNetworkError`, with `late`, after `limit_s` seconds.

    Any thread. `call` runs on another thread, which is abandoned if it does not return in time, or
    `check`, called meanwhile, raises.
    """
    try:
        caller = _idle.pop()
    except IndexError:
        caller = _Caller()
    caller.calls.put(call)
    waited_s = 0.0  # counted, as this process may be stopped meanwhile, too
    while True:
        with suppress(queue.Empty):
            result, error = caller.results.get(timeout=_POLL_S)
            break
        waited_s += _POLL_S
        try:
            check()
            if waited_s > limit_s:
                raise DistNetworkError(f'{late} for {limit_s:g} s')
        except BaseException:
            caller.calls.put(None)
            raise
    _idle.append(caller)
    if error is not None:
        raise error
    return cast(T, result)


class _Caller:
    """A thread that makes calls, one after the other: its start would take 0.1 ms of each."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[tuple[object, Exception | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name='sparse-ckpt-call', daemon=True).start()

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                self.results.put((call(), None))
            except Exception as error:  # raised again on the waiting thread
                self.results.put((None, error))
            del call  # and its tensors


class _WaitEnded(RuntimeError):
    """Another thread ended the wait for a gloo operation; tensors have undefined contents."""

    def __init__(self) -> None:
        super().__init__('the wait for a gloo operation was ended: a failure was announced')


def install() -> None:
    """Make all waits for gloo operations of this process interruptible. Idempotent.

    Not for processes that also use NCCL, where a sliced wait would block.
    """
    Work.wait = _wait  # type: ignore[method-assign, assignment]


def show() -> None:
    """Make all waits of this process visible on the Python stack, as torch's leave no frame.

    For processes without interruptible waits; the waits of `install` are visible, too.
    Idempotent.
    """
    if Work.wait is _torch_wait:
        Work.wait = _shown  # type: ignore[method-assign, assignment]


def end() -> None:
    """Make current waits, and later ones until `resume`, raise `_WaitEnded`. Any thread.

    Call this once all connections are closed, when no operation writes to tensors any more.
    """
    _ended.set()


def resume() -> None:
    """Allow waits again, for operations of new backends. Training thread."""
    _ended.clear()


def _shown(work: Work, timeout: timedelta | None = None) -> bool:
    if timeout is not None:
        return _torch_wait(work, timeout)
    return waited.timed(lambda: _torch_wait(work))


def _wait(work: Work, timeout: timedelta | None = None) -> bool:
    """Replacement of `Work.wait`; a call with a timeout is left to torch."""
    if timeout is not None:
        return _torch_wait(work, timeout)
    _raise_if_ended()
    kind: int = work._get_op_type()  # type: ignore[attr-defined]
    wait = _wait_by_another if kind in _WITHOUT_SLICES else _wait_in_slices
    return waited.timed(lambda: wait(work))


def _wait_in_slices(work: Work) -> bool:
    while True:
        try:
            return _torch_wait(work, _SLICE)
        except RuntimeError:  # timeout, or the operation failed
            if work.is_completed():
                return _torch_wait(work)
        _raise_if_ended()


def _raise_if_ended() -> None:
    if _ended.is_set():
        raise _WaitEnded


def _wait_by_another(work: Work) -> bool:
    return in_time(lambda: _torch_wait(work), math.inf, _raise_if_ended)
