# SPDX-License-Identifier: Apache-2.0
"""How a NCCL backend is connected, and how all that waits in it is ended.

Written from torch's API and its documentation. The process should run with
TORCH_NCCL_ASYNC_ERROR_HANDLING=0: else torch's own watchdog may end it before it regroups.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch.distributed import ProcessGroupNCCL, Store

PARTS: dict[str, tuple[str, ...]] = {
    'distributed.ProcessGroupNCCL': ('_group_end', '_group_start', 'abort', 'options')
}
"""Private parts of torch that this uses (see `internals.check`)."""

_SPLIT_UNSET = -2
"""torch's initial value of `split_color`."""

logger = logging.getLogger(__name__)


class Nccl:
    """Backends for tensors in GPU memory."""

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
    ) -> ProcessGroupNCCL:
        """A backend for the ranks that connect through `store`.

        As in torch, communicators are made by the first operation, unless the group is bound to a
        device.

        Args:
            store: where they publish their addresses.
            rank: in the group.
            size: of the group.
            options: of the predecessor.
            device: that the group is bound to.
            timeout: not used; NCCL waits as long as `options` say.
            interrupted: not used.

        Raises:
            RuntimeError: the device is bound and the other ranks did not come.
        """
        backend = ProcessGroupNCCL(store, rank, size, options)
        if device is not None:
            backend.eager_connect_single_device(device)
        return backend

    def forget(self, store: Store, rank: int) -> None:
        """NCCL's few keys have names of its own; they stay in the store."""

    def close(self, backends: Sequence[ProcessGroupNCCL]) -> None:
        """End every operation, pending or to come. Any thread; all ranks must do it.

        What waits for a stream returns, with undefined contents of tensors, rather than raises:
        look for the fault after waiting.
        """
        if not backends:
            return
        # As one NCCL group: aborts of different communicators may wait for each other.
        backends[0]._group_start()
        try:
            for backend in backends:
                backend.abort()
        finally:
            try:
                backends[0]._group_end()
            except RuntimeError as error:  # expected of communicators in an error state
                logger.warning('NCCL reported while communicators were aborted: %s', error)
