# SPDX-License-Identifier: Apache-2.0
"""Connects gloo backends, and makes all operations in them raise."""

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Store

from moevement_ext.regroup import waits

NAME = 'gloo'
PARTS: dict[str, tuple[str, ...]] = {
    'distributed.ProcessGroupGloo': ('_set_default_timeout', 'options', 'recv'),
    **waits.PARTS,
}
"""Private parts of torch used here (see `internals.check`)."""

_AT_ONCE = timedelta(milliseconds=1)
_MAX_THREADS = 32
# No operation uses the highest tags.
_LAST_TAG = 2**31 - 1


class Gloo:
    """Backends for tensors in host memory; the same methods as `nccl.Nccl`."""

    waits_return = False
    """False: ended operations raise; True: they return, with undefined contents of tensors."""
    at_a_time = 16
    """Number of groups that may be connected at the same time."""

    def options(self, backend: ProcessGroupGloo) -> timedelta:
        """Options for a successor of `backend`."""
        return backend.options._timeout

    def default_options(self, timeout: timedelta) -> timedelta:
        """Options for the successor of a fake backend."""
        return timeout

    def connect(
        self,
        store: Store,
        rank: int,
        size: int,
        options: timedelta,
        device: torch.device | None,
        timeout: timedelta,
        check: Callable[[], None],
        at_once: bool,
    ) -> ProcessGroupGloo:
        """Connect a backend with all others that connect through `store`.

        `options` is the timeout of later operations, `timeout` that for the other members.
        `device` and `at_once` are unused: gloo always connects at once. Raises
        `RuntimeError` if a member did not connect, or left, or as `check`, called meanwhile.
        """
        backend = waits.in_time(
            lambda: ProcessGroupGloo(store, rank, size, timeout=timeout),
            timeout.total_seconds(),
            check,
            'a backend has not connected',
        )
        backend._set_default_timeout(options)
        return backend

    def forget(self, store: Store, rank: int) -> None:
        """Remove the rank's address, which `connect` left in the store."""
        for context in range(_contexts()):
            store.delete_key(f'{context}/{rank}')

    def close(self, backends: Sequence[ProcessGroupGloo]) -> None:
        """Make all pending and later operations raise. Any thread; takes a few ms.

        `abort` does nothing on gloo. But a receive that times out makes gloo close all
        connections of its context.
        """
        backends = [backend for backend in backends if backend.size() > 1]
        if backends:
            # Each close waits 1 ms, then for its own threads; in parallel this is much faster.
            with ThreadPoolExecutor(min(len(backends), _MAX_THREADS)) as pool:
                list(pool.map(_close_one, backends))

    def is_connected(self, backend: ProcessGroupGloo) -> bool:
        """Always True: gloo connects at once."""
        return True

    def make_room(self) -> None: ...

    def end_calls(self) -> None: ...

    def synchronize(self) -> None:
        """Do nothing: every operation is waited for by itself."""

    def check_device(self) -> None: ...


def _close_one(backend: ProcessGroupGloo) -> None:
    # All peers are tried, since a receive from a peer with a closed connection fails before it can
    # time out. Once the context is closed, a try costs microseconds.
    for peer in range(backend.size()):
        if peer != backend.rank():
            _run_out_of_time(backend, peer)


def _run_out_of_time(backend: Any, peer: int) -> None:
    scratch = torch.empty(1, device='cpu')
    # Tags select the contexts in turn.
    for tag in range(_LAST_TAG - _contexts(), _LAST_TAG):
        with contextlib.suppress(RuntimeError):
            backend.recv([scratch], peer, tag).wait(_AT_ONCE)


def _contexts() -> int:
    """Number of gloo's contexts: one per configured network interface."""
    return len(os.environ.get('GLOO_SOCKET_IFNAME', '').split(','))
