# SPDX-License-Identifier: Apache-2.0
"""The process groups of a process, connected anew in one round after another."""

import threading
from collections.abc import Collection
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from moevement_ext.regroup.interruptible_store import InterruptibleStore
from moevement_ext.regroup.process_groups import ProcessGroups, connect_timeout


class RoundGroups:
    """Without groups, before `make`, nothing happens but in `renew`, which comes later.

    Args:
        world_size: number of ranks.
        timeout: of a collective.
    """

    def __init__(self, world_size: int, timeout: timedelta) -> None:
        self._world_size = world_size
        self._timeout = timeout
        self._made: ProcessGroups | None = None
        self._in_use: list[Store] = []

    def make(self, distributed_backend: str) -> None:
        """Take over the groups that torch has, once."""
        if self._made is None:
            self._made = ProcessGroups(distributed_backend, self._timeout)

    def renew(
        self,
        round_store: Store,
        members: Collection[int] | None,
        kept: Collection[int],
        interrupted: threading.Event,
    ) -> None:
        """Connect the groups of `members` (None: all) anew, silence others but of `kept`.

        Args:
            round_store: of the round.
            members: ranks.
            kept: ranks whose groups stay.
            interrupted: ends it, once set.
        """
        assert self._made is not None
        timeout = min(self._timeout, connect_timeout(self._world_size))
        prefix = PrefixStore(f'groups/{"all" if members is None else min(members)}', round_store)
        store = InterruptibleStore(prefix, interrupted, timeout)
        self._in_use = [*self._in_use[-1:], store]  # the groups clean up in the one before
        self._made.renew(store, members, timeout, kept)

    def silence(self, round_store: Store) -> None:
        """Let all collectives complete at once; those of a new process do from the start."""
        if self._made is not None:
            store = InterruptibleStore(round_store, threading.Event(), self._timeout)
            self._made.renew(store, (), self._timeout)

    def unblock(self) -> None:
        """End all waits. Any thread."""
        if self._made is not None:
            self._made.unblock()

    def end_calls(self) -> None:
        """Close what the training thread has begun to call as a group."""
        if self._made is not None:
            self._made.end_calls()

    def synchronize(self) -> None:
        """Wait for what is queued on the GPU."""
        if self._made is not None:
            self._made.synchronize()

    @property
    def waits_returned(self) -> bool:
        """Collectives may have been ended without an error, with any result."""
        return self._made is not None and self._made.waits_returned

    def check_device(self) -> None:
        """Raises RuntimeError: the GPU of this process is of no more use."""
        if self._made is not None:
            self._made.check_device()
