# SPDX-License-Identifier: Apache-2.0
"""A backend for CPU tensors that fails like NCCL; gloo does the work.

It replaces `torch.distributed.ProcessGroupNCCL`, so that the engine's code for NCCL
(`moevement_ext.regroup.nccl`) runs in jobs without a GPU. Written from the sources of torch 2.15
and NCCL 2.28. It reproduces these properties:

- An operation whose peer is lost hangs until its communicator is aborted. Then it *returns*, with
  arbitrary values in the tensors that it writes to; later calls raise.
- An abort ends when nothing hangs on the device any more, in any communicator.
- A send or receive that is called after the loss has been detected raises. (With NCCL, all calls
  do.)
- A coalescing region opens a group on its thread, and each send and receive in it opens an inner
  group, which an error leaves open and which torch does not count. Until all groups are closed, all
  calls of the thread (to any communicator, also a new one) are only recorded, do not start, and
  seem to complete at once; a communicator created meanwhile has no ranks.
- A communicator is created by the first operation, and cannot be aborted before that.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import DistBackendError, PrefixStore, ProcessGroup, ProcessGroupGloo, Store
from torch.distributed.distributed_c10d import Backend as Backends

from moevement_ext.membership import training_thread
from moevement_ext.regroup import process_groups, waits
from moevement_ext.regroup.gloo import Gloo

_POLL_SECONDS = 0.005
_OPERATIONS = (
    'all_gather_single all_gather_single_coalesced all_to_all_single allgather allgather_coalesced '
    'allreduce allreduce_coalesced alltoall broadcast gather recv reduce reduce_scatter '
    'reduce_scatter_single reduce_scatter_single_coalesced scatter'
).split()
"""Operations whose first argument is their output."""
_WITHOUT_RESULT = ('send', 'barrier')
_POINT_TO_POINT = ('send', 'recv')
_garbage = torch.Generator()


def install() -> None:
    """Register this backend as 'nccl' in this process. Call before the first process group."""
    dist.ProcessGroupNCCL = NcclLike  # type: ignore[misc, assignment]
    Backends.register_backend('nccl', _create, extended_api=True, devices=['cpu'])
    Backends.backend_type_map['nccl'] = ProcessGroup.BackendType.NCCL
    process_groups._KINDS[NcclLike.__name__] = process_groups.NCCL
    from moevement_ext.regroup import nccl  # binds the class above

    nccl.Nccl.__init__ = lambda self: None  # type: ignore[method-assign]
    nccl.Nccl.end_calls = _end_calls  # type: ignore[method-assign]
    training_thread._WAITING_FOR_OTHERS += (__file__,)


class Options:
    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)
        self.split_from: Any = None


class _Group(threading.local):
    """Nested groups of NCCL calls of one thread, and torch's count of them."""

    def __init__(self) -> None:
        self.depth = 0
        self.counted = 0
        self.failed = False
        self.noted: list[_Operation] = []

    def end(self) -> list['_Operation']:
        """Close the innermost group; return the operations that start unless one of them failed."""
        if not self.depth:
            raise DistBackendError('NCCL error: ncclGroupEnd: not in a group call')
        self.depth -= 1
        if self.depth:
            return []
        noted, self.noted = self.noted, []
        failed, self.failed = self.failed, False
        if failed:
            raise DistBackendError('NCCL error: remote process exited, in the group')
        return noted


_group = _Group()


def _end_calls(nccl: Any) -> None:
    while _group.depth:
        with contextlib.suppress(DistBackendError):
            _start_all(_group.end())
    _group.counted = 0


_communicators: 'weakref.WeakSet[NcclLike]' = weakref.WeakSet()


class NcclLike(c10d.Backend):
    """One communicator with all ranks of a group."""

    Options = Options
    supports_coalescing = True
    options = Options()  # torch has a property here

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self._store = PrefixStore('communicator', store)
        self.options = options
        self.aborted = threading.Event()
        self._gloo: ProcessGroupGloo | None = None
        self._started: list[_Operation] = []
        _communicators.add(self)

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it by this name
        return 'nccl'

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Create the communicator now."""
        self._connect()

    def _is_initialized(self) -> bool:
        return self._gloo is not None

    def start(self, operation: '_Operation') -> None:
        """Start an operation, or record it if a group is open."""
        if self.aborted.is_set():
            raise DistBackendError('NCCL communicator was aborted')
        inner = operation.name in _POINT_TO_POINT
        _group.depth += inner
        if inner and any(before.failed() for before in self._started):
            _group.failed = True
            raise DistBackendError('NCCL error: remote process exited or there was a network error')
        if self._gloo is None and _group.depth - inner > _group.counted:
            raise DistBackendError('NCCL error: invalid root 0 (root should be in the 0..0 range)')
        _group.noted.append(operation)
        if inner:
            _start_all(_group.end())
        elif not _group.depth:
            _group.noted.remove(operation)
            self.launch(operation)

    def launch(self, operation: '_Operation') -> None:
        if self.aborted.is_set():
            raise DistBackendError('NCCL communicator was aborted')
        try:
            operation.work = getattr(self._connect(), operation.name)(*operation.arguments)
        except RuntimeError:  # gloo knows already that the peer is lost
            operation.lost = True
        self._started = [before for before in self._started if not before.done()]
        self._started.append(operation)

    def start_coalescing(self) -> None:
        _group.depth += 1
        _group.counted += 1

    def end_coalescing(self) -> '_Work':
        """Close the group; return the work that waits for the operations in it."""
        noted = _group.end()
        _group.counted -= 1
        _start_all(noted)
        return _Work(noted)

    def hangs(self) -> bool:
        """True if an operation of this communicator has started and does not end."""
        return not self.aborted.is_set() and any(found.hangs() for found in list(self._started))

    def abort(self) -> None:
        """End all started operations; then free memory, which waits for the device."""
        self.aborted.set()
        deadline = time.monotonic() + self.options._timeout.total_seconds()
        while (hangs := any(other.hangs() for other in list(_communicators))) and (
            time.monotonic() < deadline
        ):
            time.sleep(_POLL_SECONDS)
        if self._gloo is not None:
            Gloo().close([self._gloo])
        if hangs:
            raise DistBackendError('NCCL communicator was not aborted in time')

    def _connect(self) -> ProcessGroupGloo:
        if self._gloo is None:
            self._gloo = ProcessGroupGloo(
                self._store, self.rank(), self.size(), timeout=self.options._timeout
            )
        return self._gloo


def _start_all(operations: list['_Operation']) -> None:
    for operation in operations:
        operation.communicator.launch(operation)


class _Operation:
    def __init__(self, communicator: NcclLike, name: str, arguments: tuple[Any, ...]) -> None:
        self.communicator = communicator
        self.name = name
        self.arguments = arguments
        self.work: dist.Work | None = None
        self.lost = False
        self._ended = False

    def hangs(self) -> bool:
        """True if it has started and is not complete."""
        return (self.work is not None or self.lost) and not self._ended and not self.done()

    def done(self) -> bool:
        return self.work is not None and self.work.is_completed() and self.work.is_success()

    def failed(self) -> bool:
        """True if its peer is known to be lost."""
        failed = self.work is not None and self.work.is_completed() and not self.work.is_success()
        return failed or self.lost

    def wait(self) -> None:
        """Wait until it is complete or its communicator is aborted."""
        if self._ended or not (self.work or self.lost):
            return
        try:
            if self.work is None:
                raise RuntimeError('the peer was lost before')
            waits._wait(self.work)
        except RuntimeError:  # gloo has noticed that a peer is lost
            self.communicator.aborted.wait()
            if self.name in _OPERATIONS:
                _spoil(self.arguments[0])
        self._ended = True


class _Work(dist.Work):
    """The result that a caller waits for; on a GPU, the stream waits."""

    def __init__(self, operations: list[_Operation]) -> None:
        super().__init__()
        self._operations = operations

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        """Return without an error, whatever the result."""
        for operation in self._operations:
            operation.wait()
        return True


def _spoil(written: Any) -> None:
    with torch.no_grad():
        for tensor in _tensors(written):
            if tensor.is_floating_point():
                tensor.uniform_(generator=_garbage)
            else:
                tensor.random_(0, 2, generator=_garbage)


def _tensors(nested: torch.Tensor | Iterable[Any]) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    else:
        for item in nested:
            yield from _tensors(item)


def _operation(name: str) -> Callable[..., _Work]:
    def call(self: NcclLike, *arguments: Any) -> _Work:
        operation = _Operation(self, name, arguments)
        self.start(operation)
        return _Work([operation])

    return call


for _name in (*_OPERATIONS, *_WITHOUT_RESULT):
    setattr(NcclLike, _name, _operation(_name))


def _create(given: Any, options: Options | None) -> NcclLike:
    """Create the backend of a new process group, called by torch."""
    options = options or Options()
    options._timeout = given.timeout
    return NcclLike(given.store, given.group_rank, given.group_size, options)
