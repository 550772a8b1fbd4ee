# SPDX-License-Identifier: Apache-2.0
"""Process groups of processes that are threads of one process."""

import threading
import uuid
from collections import deque
from collections.abc import Callable, Collection
from datetime import timedelta

from torch.distributed import Store


class Network:
    """What processes send each other, while their connections last."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: dict[tuple[str, int, int], deque[bytes]] = {}


class FakeGroups:
    """The process groups of one process, in the place of torch's.

    Args:
        rank: of the process.
        stages: number of ranks.
        network: of the job.
        raise_if_dead: called by each send and wait.
    """

    waits_returned = False

    def __init__(
        self, rank: int, stages: int, network: Network, raise_if_dead: Callable[[], None]
    ) -> None:
        self._rank = rank
        self._stages = stages
        self._network = network
        self._raise_if_dead = raise_if_dead
        self._connected: str | None = None
        self._ended = False

    def end_calls(self) -> None: ...

    def connect(self, name: str) -> None:
        """Connect with all ranks that connect under the same name."""
        self._connected = name

    def send(self, to: int, content: bytes) -> None:
        with self._network.changed:
            self._raise_if_ended()
            key = (str(self._connected), self._rank, to)
            self._network.sent.setdefault(key, deque()).append(content)
            self._network.changed.notify_all()

    def receive(self, source: int) -> bytes:
        """What comes next from there.

        Raises:
            ConnectionError: the waits of this process were ended.
        """
        key = (str(self._connected), source, self._rank)
        with self._network.changed:
            while not self._network.sent.get(key):
                self._raise_if_ended()
                self._network.changed.wait(1.0)
            return self._network.sent[key].popleft()

    def gather(self, own: bytes) -> list[bytes]:
        others = [rank for rank in range(self._stages) if rank != self._rank]
        for other in others:
            self.send(other, own)
        given = {other: self.receive(other) for other in others}
        return [given.get(rank, own) for rank in range(self._stages)]

    def _raise_if_ended(self) -> None:
        self._raise_if_dead()
        if self._ended:
            raise ConnectionError('waits were ended')
        assert self._connected is not None, 'silent groups are not used'

    # As of `ProcessGroups`

    def unblock(self) -> None:
        with self._network.changed:
            self._ended = True
            self._network.changed.notify_all()

    def renew(
        self,
        store: Store,
        members: Collection[int] | None,
        timeout: timedelta,
        kept: Collection[int] = (),
    ) -> None:
        """Connect with all members, under a name that the first of them chooses.

        The one group that there is has all ranks, so that less than all are never kept.
        """
        self._ended, self._connected = False, None
        ranks = sorted(range(self._stages) if members is None else members)
        if self._rank in ranks:
            store.set(str(self._rank), uuid.uuid4().hex)
            store.wait([str(rank) for rank in ranks])
            self.connect(store.get(str(ranks[0])).decode())

    def synchronize(self) -> None: ...

    def check_device(self) -> None: ...
