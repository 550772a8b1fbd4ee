# SPDX-License-Identifier: Apache-2.0
"""Interruptible waits for gloo operations, in any state of the operation.

Closing the connections of a backend makes every operation raise that has not moved a byte. A
connection forgets its half-transferred operation (gloo's `Pair::signalException` handles queued
operations only), and `Work.wait` would last until the group's timeout, minutes by default. So this
module replaces `Work.wait` by a wait that polls for an interruption. An abandoned operation keeps
its tensors and a thread until the group's timeout.
"""

import queue
import threading
from datetime import timedelta

from torch._C._distributed_c10d import OpType, Work  # type: ignore[attr-defined]

PARTS: dict[str, tuple[str, ...]] = {
    '_C._distributed_c10d': ('OpType', 'Work'),
    '_C._distributed_c10d.Work': ('_get_op_type', 'wait', 'is_completed'),
}
"""Private parts of torch used here (see `internals.check`). Checked against torch 2.15."""

_LOOK_UP_S = 0.25
_SLICE = timedelta(seconds=_LOOK_UP_S)
# Kinds of work without short waits: a timeout closes the connections (the first three), or the work
# supports no timeout. Composite works, such as reduce-scatter, have an unknown kind.
_WITHOUT_SLICES = frozenset(
    int(kind) for kind in (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE, OpType.UNKNOWN)
)

_torch_wait = Work.wait
_ended = threading.Event()
_idle: list['_Waiter'] = []


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
    return _torch_wait(work) if timeout is None else _torch_wait(work, timeout)


def _wait(work: Work, timeout: timedelta | None = None) -> bool:
    """Replacement of `Work.wait`; a call with a timeout is left to torch."""
    if timeout is not None:
        return _torch_wait(work, timeout)
    if _ended.is_set():
        raise _WaitEnded
    kind: int = work._get_op_type()  # type: ignore[attr-defined]
    if kind in _WITHOUT_SLICES:
        return _wait_by_another(work)
    return _wait_in_slices(work)


def _wait_in_slices(work: Work) -> bool:
    while True:
        try:
            return _torch_wait(work, _SLICE)
        except RuntimeError:  # timeout, or the operation failed
            if work.is_completed():
                return _torch_wait(work)
        if _ended.is_set():
            raise _WaitEnded


def _wait_by_another(work: Work) -> bool:
    """Wait on another thread, which is abandoned in the worst case."""
    try:
        waiter = _idle.pop()
    except IndexError:
        waiter = _Waiter()
    result = waiter.wait(work)
    _idle.append(waiter)
    if isinstance(result, Exception):
        raise result
    return result


class _Waiter:
    """A thread that waits for works, one after the other."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[bool | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._run, name='sparse-ckpt-wait', daemon=True).start()

    def wait(self, work: Work) -> bool | Exception:
        """Wait for a work on the thread; returns the result or the exception.

        Raises `_WaitEnded` if the wait was ended; drop this thread.
        """
        self._works.put(work)
        while True:
            try:
                return self._results.get(timeout=_LOOK_UP_S)
            except queue.Empty:
                if _ended.is_set():
                    self._works.put(None)
                    raise _WaitEnded from None

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            try:
                self._results.put(_torch_wait(work))
            except Exception as error:  # raised again on the waiting thread
                self._results.put(error)
            del work  # and its tensors
