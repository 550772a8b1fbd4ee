# SPDX-License-Identifier: Apache-2.0
"""Waits for gloo operations that can be ended, whatever has become of the operation.

Closing the connections of a backend makes every operation raise of which no byte has moved. One
that is half transferred is forgotten by its connection (gloo's `Pair::signalException` knows the
queued ones only), and `Work.wait` would last as long as the group allows to an operation, minutes
by default. So `Work.wait` is replaced by one that looks up now and then.

What no longer is waited for keeps its tensors, and a thread, until the group's time is up.
"""

import queue
import threading
from datetime import timedelta

from torch._C._distributed_c10d import OpType, Work  # type: ignore[attr-defined]

PARTS: dict[str, tuple[str, ...]] = {
    '_C._distributed_c10d': ('OpType', 'Work'),
    '_C._distributed_c10d.Work': ('_get_op_type', 'wait', 'is_completed'),
}
"""Private parts of torch that this uses (see `internals.check`). Checked against torch 2.15."""

_LOOK_UP_SECONDS = 0.25
_SLICE = timedelta(seconds=_LOOK_UP_SECONDS)
# A wait that runs out of time closes the connections (the first three), or knows no time: works
# made of others, as of reduce-scatter, say that their kind is not known.
_WITHOUT_SLICES = frozenset(
    int(kind) for kind in (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE, OpType.UNKNOWN)
)

_torch_wait = Work.wait
_ended = threading.Event()
_idle: list['_Waiter'] = []


class WaitEnded(RuntimeError):
    """The wait for a gloo operation was ended from outside; tensors have undefined contents."""

    def __init__(self) -> None:
        super().__init__('the wait for a gloo operation was ended: a failure was announced')


def install() -> None:
    """Have all waits for gloo operations of this process be such. Idempotent.

    Not for processes that use NCCL, too: a wait in slices would block there.
    """
    Work.wait = _wait  # type: ignore[method-assign, assignment]


def show() -> None:
    """Have all waits of this process be seen on the stack, where torch's leave no frame.

    For processes whose waits need not be ended; those of `install` are seen, too. Idempotent.
    """
    if Work.wait is _torch_wait:
        Work.wait = _shown  # type: ignore[method-assign, assignment]


def end() -> None:
    """Make waits raise `WaitEnded`, those to come until `resume`, too. Any thread.

    To be called when all connections are closed: nothing is written to tensors after that.
    """
    _ended.set()


def resume() -> None:
    """Operations of new backends are to be waited for. Training thread."""
    _ended.clear()


def _shown(work: Work, timeout: timedelta | None = None) -> bool:
    return _torch_wait(work) if timeout is None else _torch_wait(work, timeout)


def _wait(work: Work, timeout: timedelta | None = None) -> bool:
    """In the place of `Work.wait`; one that names its time is left to torch."""
    if timeout is not None:
        return _torch_wait(work, timeout)
    if _ended.is_set():
        raise WaitEnded
    kind: int = work._get_op_type()  # type: ignore[attr-defined]
    if kind in _WITHOUT_SLICES:
        return _wait_by_another(work)
    return _wait_in_slices(work)


def _wait_in_slices(work: Work) -> bool:
    while True:
        try:
            return _torch_wait(work, _SLICE)
        except RuntimeError:  # out of time, or the operation failed
            if work.is_completed():
                return _torch_wait(work)
        if _ended.is_set():
            raise WaitEnded


def _wait_by_another(work: Work) -> bool:
    """A thread waits that is left alone with it in the worst case."""
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
    """A thread that waits for one work after the other."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[bool | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._run, name='sparse-ckpt-wait', daemon=True).start()

    def wait(self, work: Work) -> bool | Exception:
        """Have the thread wait for a work; what that returned or raised.

        Raises:
            WaitEnded: the thread is of no more use.
        """
        self._works.put(work)
        while True:
            try:
                return self._results.get(timeout=_LOOK_UP_SECONDS)
            except queue.Empty:
                if _ended.is_set():
                    self._works.put(None)
                    raise WaitEnded from None

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            try:
                self._results.put(_torch_wait(work))
            except Exception as error:  # raised where it is waited for
                self._results.put(error)
            del work  # and its tensors
