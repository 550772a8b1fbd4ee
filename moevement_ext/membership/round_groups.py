# SPDX-License-Identifier: Apache-2.0
"""The process groups of a process, reconnected in each round."""

import threading
from collections.abc import Collection
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from moevement_ext.regroup.interruptible_store import InterruptibleStore
from moevement_ext.regroup.process_groups import ProcessGroups, connect_timeout


class RoundGroups:
    """Process groups of torch.

    Before `make`, all methods do nothing, and `renew` is not allowed.
    """

    def __init__(self, world_size: int, timeout: timedelta) -> None:
        self._world_size = world_size
        self._timeout = timeout
        self._made: ProcessGroups | None = None
        self._in_use: list[Store] = []

    def make(self, distributed_backend: str) -> None:
        """Take over torch's process groups; only the first call has an effect."""
        if self._made is None:
            self._made = ProcessGroups(distributed_backend, self._timeout)

    def renew(
        self,
        round_store: Store,
        members: Collection[int] | None,
        kept: Collection[int],
        interrupted: threading.Event,
    ) -> None:
        """Reconnect groups of `members` (None: all); silence others, except those of `kept`.

        Setting `interrupted` ends the attempt.
        """
        assert self._made is not None
        timeout = min(self._timeout, connect_timeout(self._world_size))
        prefix = PrefixStore(f'groups/{"all" if members is None else min(members)}', round_store)
        store = InterruptibleStore(prefix, interrupted, timeout)
        # The groups delete their keys in the previous store.
        self._in_use = [*self._in_use[-1:], store]
        self._made.renew(store, members, timeout, kept)

    def silence(self, round_store: Store) -> None:
        """Let all collectives return at once; in a new process they do so from the start."""
        if self._made is not None:
            store = InterruptibleStore(round_store, threading.Event(), self._timeout)
            self._made.renew(store, (), self._timeout)

    def unblock(self) -> None:
        """End all waits. Any thread."""
        if self._made is not None:
            self._made.unblock()

    def end_calls(self) -> None:
        """Close the group call that the training thread has begun."""
        if self._made is not None:
            self._made.end_calls()

    def synchronize(self) -> None:
        if self._made is not None:
            self._made.synchronize()

    @property
    def waits_returned(self) -> bool:
        """True if collectives may have ended without an error, with undefined results."""
        return self._made is not None and self._made.waits_returned

    def check_device(self) -> None:
        """Raise `RuntimeError` if the GPU of this process is lost."""
        if self._made is not None:
            self._made.check_device()
