# SPDX-License-Identifier: Apache-2.0
"""Connects NCCL backends, and ends all operations in them.

`nccl_environment` sets variables before the first process group. Written from the sources of torch
2.11 and 2.15 (`ProcessGroupNCCL`) and of NCCL 2.28.

Communicators are not split from the world's communicator, although all splits would need only one
exchange of addresses. torch splits while it holds the parent's mutex
(`ProcessGroupNCCL::initNCCLComm`). Only an abort of the parent would end the wait for a member lost
in between, and the abort takes the same mutex first (`ProcessGroupNCCL::abortComms`). Also, all
ranks of the world take part in each split, even ranks outside the group (`performNocolorSplit`).
"""

import ctypes
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroupNCCL, Store

from moevement_ext.logger import logger_of
from moevement_ext.regroup.internals import UnsupportedTorchError
from moevement_ext.regroup.waits import in_time

PARTS: dict[str, tuple[str, ...]] = {
    'distributed.ProcessGroupNCCL': (
        '_is_initialized',
        'abort',
        'eager_connect_single_device',
        'options',
    )
}
"""Private parts of torch used here (see `internals.check`)."""

# torch's initial value of `split_color`.
_SPLIT_UNSET = -2

logger = logger_of(__name__)


# torch's count of the groups that it has opened, per thread.
_COUNT = '_ZN4c10d16ProcessGroupNCCL23ncclActiveGroupCounter_E'
# ncclInvalidUsage.
_NOT_IN_A_GROUP = 5
# Far deeper than torch nests groups.
_DEEPEST = 64


class Nccl:
    """Backends for tensors in GPU memory.

    Raises `UnsupportedTorchError` if torch's library does not export NCCL's groups of calls.
    """

    waits_return = True
    at_a_time = 1  # communicators of one process are created one after the other

    def __init__(self) -> None:
        path = Path(torch.__file__).parent / 'lib' / 'libtorch_cuda.so'
        try:
            self._library = ctypes.CDLL(str(path))
            self._end = self._library.ncclGroupEnd  # from libnccl, which torch's library links to
            self._count()
        except (AttributeError, OSError, ValueError) as error:
            raise UnsupportedTorchError(
                f"does not give access to NCCL's groups of calls ({error})"
            ) from error

    def options(self, backend: ProcessGroupNCCL) -> ProcessGroupNCCL.Options:
        """Options for a successor of `backend`: timeout, priority, configuration."""
        options = backend.options
        if options.split_from is not None:
            # A communicator cannot be split from an aborted one.
            options.split_from = None  # type: ignore[assignment]
            options.split_color = _SPLIT_UNSET
        return options

    def default_options(self, timeout: timedelta) -> ProcessGroupNCCL.Options:
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return options

    def connect(
        self,
        store: Store,
        rank: int,
        size: int,
        options: ProcessGroupNCCL.Options,
        device: torch.device | None,
        timeout: timedelta,
        check: Callable[[], None],
        at_once: bool,
    ) -> ProcessGroupNCCL:
        """Connect a backend, with its communicator, with all other members.

        torch creates communicators in the first operation, which would wait for a member
        lost meanwhile: a communicator cannot be aborted before it is complete. NCCL's
        non-blocking mode allows that, but it has hung (NCCL 2.26), and torch no longer uses
        it.

        `options` are the predecessor's; their timeout applies to later operations,
        `timeout` to this call. `device` None: that of the calling thread. `at_once`, the same on
        all members: create the communicator now, else at the first operation, as at a
        start. Raises `RuntimeError` if a member did not connect, or left, or as `check`.
        """
        own = device or torch.device(torch.cuda.current_device())

        def connect() -> ProcessGroupNCCL:
            torch.cuda.set_device(own)  # else the thread would create a context on the first GPU
            backend = ProcessGroupNCCL(store, rank, size, options)
            if size > 1 and at_once:
                backend.eager_connect_single_device(own)
            return backend

        return in_time(connect, timeout.total_seconds(), check, 'a backend has not connected')

    def is_connected(self, backend: ProcessGroupNCCL) -> bool:
        """True if an operation or `connect` has created a communicator."""
        return bool(backend._is_initialized())

    def make_room(self) -> None:
        """Free the unused GPU memory that torch's allocator keeps.

        Communicators allocate outside torch's allocator, which has grown since they were
        first created: a full GPU has no room for new communicators.
        """
        kept = torch.cuda.memory_reserved()
        gc.collect()
        torch.cuda.empty_cache()
        if freed := kept - torch.cuda.memory_reserved():
            logger.warning(
                'freed %d MiB of unused GPU memory for new communicators', freed // 2**20
            )

    def forget(self, store: Store, rank: int) -> None:
        """Do nothing: NCCL's few keys have unique names and stay in the store."""

    def close(self, backends: Sequence[ProcessGroupNCCL]) -> None:
        """End all pending and later operations. Any thread; all ranks must call this.

        A wait for a stream returns, with undefined contents of tensors, and does not raise:
        check for the fault after each wait.
        """
        if backends:
            # All in parallel: an abort frees memory, which needs an idle device, while hanging
            # kernels of another communicator end only when that one is aborted, too.
            with ThreadPoolExecutor(len(backends), thread_name_prefix='sparse-ckpt-abort') as pool:
                list(pool.map(_abort, backends))

    def end_calls(self) -> None:
        """Close groups of calls that an error left open; reset torch's count. Training thread.

        While a group is open on a thread, NCCL only records that thread's calls, of any
        communicator, and starts none; a communicator created meanwhile has no ranks yet. An
        exception between begin and end leaves a group open. `batch_isend_irecv` opens one group,
        `ProcessGroupNCCL` opens another around each send and receive, and torch counts only the
        first kind. A failing end closes the group but stays in torch's count. (Read in torch 2.11
        and 2.14 and NCCL 2.28; seen on a GPU with torch 2.11.)

        An exchange of tokens opens a group, too (`all2all_single_unequal_split`), in a backward
        pass on the thread that computes gradients: one per GPU, for the lifetime of the process.
        """
        self._end_calls_of_thread()
        if torch.cuda.is_initialized():
            with suppress(RuntimeError):  # the GPU is lost, which `check_device` reports
                device = torch.device('cuda', torch.cuda.current_device())
                _on_gradient_thread(device, self._end_calls_of_thread)

    def _end_calls_of_thread(self) -> None:
        for _ in range(_DEEPEST):
            if self._end() == _NOT_IN_A_GROUP:
                break
        self._count().value = 0

    def _count(self) -> ctypes.c_uint64:
        return ctypes.c_uint64.in_dll(self._library, _COUNT)

    def synchronize(self) -> None:
        stream = torch.cuda.current_stream()
        if not stream.query():  # upstream has often waited already, for the gradient norm
            stream.synchronize()

    def check_device(self) -> None:
        """Check that the device still computes.

        Raises `RuntimeError` if the context is lost, as after an access to memory of a dead
        peer.
        """
        torch.cuda.synchronize()
        torch.ones(1, device=torch.cuda.current_device()).add_(1).item()


class _Call(torch.autograd.Function):
    """Passes a tensor on; its backward pass makes a call."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return gradients[0], None


def _on_gradient_thread(device: torch.device, call: Callable[[], None]) -> None:
    """Make a call where torch computes gradients of this device; queues nothing on the device."""
    nothing = torch.empty(0, device=device, requires_grad=True)
    with torch.enable_grad():
        passed = _Call.apply(nothing, call)
    torch.autograd.backward(passed, torch.empty(0, device=device))


def _abort(backend: ProcessGroupNCCL) -> None:
    try:
        backend.abort()
    except RuntimeError as error:  # expected of communicators in an error state
        logger.warning('NCCL reported while a communicator was aborted: %s', error)
