# SPDX-License-Identifier: Apache-2.0
"""Interruptible waits: for a call on a thread of its own, and for any gloo operation.

Closing the connections of a backend makes every operation raise that has not moved a byte. A
connection forgets its half-transferred operation (gloo's `Pair::signalException` handles queued
operations only), and `Work.wait` would last until the group's timeout, minutes by default. So this
module replaces `Work.wait` by a wait that polls for an interruption. An abandoned operation keeps
its tensors and a thread until the group's timeout.
"""

import math
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import cast

from torch._C._distributed_c10d import OpType, Work  # type: ignore[attr-defined]
from torch.distributed import DistNetworkError

from moevement_ext.regroup.waited import waited

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

_torch_wait = Work.wait
_ended = threading.Event()
_idle: list['_Caller'] = []


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
