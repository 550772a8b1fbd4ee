# SPDX-License-Identifier: Apache-2.0
"""What each rank has committed in the present round, so that others see which rank is behind."""

import time

from torch.distributed import Store

from moevement_ext.membership.report import NOWHERE

_PUBLICATIONS_IN_A_TIMEOUT = 10


class Progress:
    """What one rank has committed, as others come to know it. On its heartbeat thread.

    Args:
        rank: whose.
        timeout_s: of a wait, after which others ask: then only the rank that is behind gets on.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._pause_s = timeout_s / _PUBLICATIONS_IN_A_TIMEOUT
        self._seen = self._published = (NOWHERE, NOWHERE)
        """Round and newest committed iteration: as last looked at, and as others know."""
        self._publish_at = 0.0

    def look(self, store: Store, round: int, committed: int) -> bool:
        """Publish it every now and then; true if it has changed since the last look."""
        now = round, committed
        got_on, self._seen = now != self._seen, now
        late = self._published[0] != round or time.monotonic() > self._publish_at
        if now != self._published and late:
            publish(store, round, self._rank, committed)
            self._published = now
            self._publish_at = time.monotonic() + self._pause_s
        return got_on


def publish(store: Store, round: int, rank: int, iteration: int) -> None:
    """Let the others know the newest iteration that `rank` has committed."""
    store.set(_key(round, rank), str(iteration))


def furthest_behind(store: Store, round: int, world_size: int) -> int | None:
    """The rank that has committed less than all others; None if there is not exactly one."""
    keys = [_key(round, rank) for rank in range(world_size)]
    if not store.check(keys):
        return None  # a rank has not trained yet
    committed = [int(found) for found in store.multi_get(keys)]
    least = min(committed)
    return committed.index(least) if committed.count(least) == 1 and world_size > 1 else None


def _key(round: int, rank: int) -> str:
    return f'progress/{round}/{rank}'
