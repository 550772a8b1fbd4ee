# SPDX-License-Identifier: Apache-2.0
"""How a gloo backend is connected, and how all that waits in it is made to raise."""

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Store

from moevement_ext.regroup import connecting, waits

NAME = 'gloo'
PARTS: dict[str, tuple[str, ...]] = {
    'distributed.ProcessGroupGloo': ('_set_default_timeout', 'options', 'recv'),
    **waits.PARTS,
}
"""Private parts of torch that this uses (see `internals.check`)."""

_AT_ONCE = timedelta(milliseconds=1)
_MAX_THREADS = 32
# Nobody sends with the highest tags.
_LAST_TAG = 2**31 - 1


class Gloo:
    """Backends for tensors in host memory."""

    waits_return = False

    def options(self, backend: ProcessGroupGloo) -> timedelta:
        """What a successor of `backend` is to take over: the time allowed to an operation."""
        return backend.options._timeout

    def default_options(self, timeout: timedelta) -> timedelta:
        """For the successor of a fake backend."""
        return timeout

    def connect(
        self,
        store: Store,
        rank: int,
        size: int,
        options: timedelta,
        device: torch.device | None,
        timeout: timedelta,
        interrupted: Callable[[], bool],
        at_once: bool,
    ) -> ProcessGroupGloo:
        """A backend connected with all others that connect through `store`.

        Args:
            store: where they publish their addresses.
            rank: in the group.
            size: of the group.
            options: time allowed to an operation later.
            device: not used by gloo.
            timeout: for the others to come.
            interrupted: true when nobody is to be waited for any more.
            at_once: gloo connects in any case.

        Raises:
            RuntimeError: they did not come, or left, or this was interrupted.
        """
        backend = connecting.in_time(
            lambda: ProcessGroupGloo(store, rank, size, timeout=timeout), timeout, interrupted
        )
        backend._set_default_timeout(options)
        return backend

    def forget(self, store: Store, rank: int) -> None:
        """Remove from the store what `connect` left there: the rank's address."""
        for context in range(_contexts()):
            store.delete_key(f'{context}/{rank}')

    def close(self, backends: Sequence[ProcessGroupGloo]) -> None:
        """Make every operation, pending or to come, raise. Any thread; a few ms.

        `abort` does nothing on gloo. But a receive that runs out of time makes gloo close all
        connections of its context.
        """
        backends = [backend for backend in backends if backend.size() > 1]
        if backends:
            # Each waits 1 ms, then for threads of its own; together that is faster by far.
            with ThreadPoolExecutor(min(len(backends), _MAX_THREADS)) as pool:
                list(pool.map(_close_one, backends))

    def is_connected(self, backend: ProcessGroupGloo) -> bool:
        """It is from the beginning."""
        return True

    def make_room(self) -> None:
        """Connections take no memory of a device."""

    def end_calls(self) -> None:
        """Gloo starts what is called at once."""

    def synchronize(self) -> None:
        """Operations are waited for one by one."""

    def check_device(self) -> None:
        """There is none."""


def _close_one(backend: ProcessGroupGloo) -> None:
    # A receive from a peer whose connection is closed fails before it can run out of time, so that
    # all peers are tried; once closed, a try costs microseconds.
    for peer in range(backend.size()):
        if peer != backend.rank():
            _run_out_of_time(backend, peer)


def _run_out_of_time(backend: Any, peer: int) -> None:
    scratch = torch.empty(1, device='cpu')
    # Tags are dealt out to the contexts in turn.
    for tag in range(_LAST_TAG - _contexts(), _LAST_TAG):
        with contextlib.suppress(RuntimeError):
            backend.recv([scratch], peer, tag).wait(_AT_ONCE)


def _contexts() -> int:
    """Gloo has one for each network interface that it was told to use."""
    return len(os.environ.get('GLOO_SOCKET_IFNAME', '').split(','))
