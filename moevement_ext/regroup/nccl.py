# SPDX-License-Identifier: Apache-2.0
"""How a NCCL backend is connected, and how all that waits in it is ended.

What has to be set before the first process group is made: see `nccl_environment`. Written from
the sources of torch 2.11 and 2.15 (`ProcessGroupNCCL`) and of NCCL 2.28.

Communicators are not split from that of the world, though one exchange of addresses would do for
all of them then. torch splits with the parent's mutex held (`ProcessGroupNCCL::initNCCLComm`), and
an abort of the parent, all that would end the wait for a member that is lost in between, takes the
same one first (`ProcessGroupNCCL::abortComms`). Besides, all ranks of the world take part in each
split, also those that have no part in the group (`performNocolorSplit`).
"""

import gc
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch.distributed import ProcessGroupNCCL, Store

from moevement_ext.regroup import connecting
from moevement_ext.regroup.nccl_calls import OpenCalls

PARTS: dict[str, tuple[str, ...]] = {
    'distributed.ProcessGroupNCCL': (
        '_is_initialized',
        'abort',
        'eager_connect_single_device',
        'options',
    )
}
"""Private parts of torch that this uses (see `internals.check`)."""

# torch's initial value of `split_color`.
_SPLIT_UNSET = -2

logger = logging.getLogger(__name__)


class Nccl:
    """Backends for tensors in GPU memory."""

    waits_return = True

    def __init__(self) -> None:
        self._open_calls = OpenCalls()

    def options(self, backend: ProcessGroupNCCL) -> ProcessGroupNCCL.Options:
        """What a successor of `backend` is to take over: timeout, priority, configuration."""
        options = backend.options
        if options.split_from is not None:
            # A communicator cannot be split from one that was aborted.
            options.split_from = None  # type: ignore[assignment]
            options.split_color = _SPLIT_UNSET
        return options

    def default_options(self, timeout: timedelta) -> ProcessGroupNCCL.Options:
        """For the successor of a fake backend."""
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
        interrupted: Callable[[], bool],
        at_once: bool,
    ) -> ProcessGroupNCCL:
        """A backend whose communicator is connected with those of all others.

        torch makes communicators with the first operation, in which a member that is lost meanwhile
        would be waited for: they cannot be aborted before they are made. Those of NCCL's
        non-blocking mode could, but that mode has hung (NCCL 2.26), and torch no longer uses it.

        Args:
            store: where they publish their addresses.
            rank: in the group.
            size: of the group.
            options: of the predecessor; its timeout is that of operations later.
            device: that the group is bound to; None: the present one.
            timeout: for the others to come.
            interrupted: true when nobody is to be waited for any more.
            at_once: make the communicator now; else with the first operation, as at a start. Alike
                for all members.

        Raises:
            RuntimeError: they did not come, or left, or this was interrupted.
        """
        own = device or torch.device(torch.cuda.current_device())

        def connect() -> ProcessGroupNCCL:
            torch.cuda.set_device(own)  # else the thread would make a context on the first GPU
            backend = ProcessGroupNCCL(store, rank, size, options)
            if size > 1 and at_once:
                backend.eager_connect_single_device(own)
            return backend

        return connecting.in_time(connect, timeout, interrupted)

    def is_connected(self, backend: ProcessGroupNCCL) -> bool:
        """Some operation has made a communicator, or `connect` has."""
        return bool(backend._is_initialized())

    def make_room(self) -> None:
        """Give back the GPU memory that torch keeps without using it.

        Communicators take theirs beside torch's allocator, which has grown since they were first
        made: a card that is full has no room for new ones.
        """
        gc.collect()
        torch.cuda.empty_cache()

    def forget(self, store: Store, rank: int) -> None:
        """NCCL's few keys have names of its own; they stay in the store."""

    def close(self, backends: Sequence[ProcessGroupNCCL]) -> None:
        """End every operation, pending or to come. Any thread; all ranks must do it.

        What waits for a stream returns, with undefined contents of tensors, rather than raises:
        look for the fault after waiting.
        """
        if backends:
            # All at once. An abort frees memory, for which the device must be idle; kernels of the
            # next communicator hang on it until that one is aborted, too.
            with ThreadPoolExecutor(len(backends), thread_name_prefix='sparse-ckpt-abort') as pool:
                list(pool.map(_abort, backends))

    def end_calls(self) -> None:
        """Close the groups of calls that an error has left open on this thread."""
        self._open_calls.close()

    def synchronize(self) -> None:
        """Wait for what this thread has queued."""
        torch.cuda.current_stream().synchronize()

    def check_device(self) -> None:
        """See that the device still computes.

        Raises:
            RuntimeError: its context is lost, as after an access to memory of a dead peer.
        """
        torch.cuda.synchronize()
        torch.ones(1, device=torch.cuda.current_device()).add_(1).item()


def _abort(backend: ProcessGroupNCCL) -> None:
    try:
        backend.abort()
    except RuntimeError as error:  # expected of communicators in an error state
        logger.warning('NCCL reported while a communicator was aborted: %s', error)
