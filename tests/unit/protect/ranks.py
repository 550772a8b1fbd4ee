# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a job promise about their windows, by real coordinators and connections."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moevement_ext.config import COORDINATOR, SparseCheckpointConfig
from moevement_ext.coordinator import coordinator_client
from moevement_ext.memory.window.name import Agreed
from moevement_ext.protect import persistence
from moevement_ext.protect.persistence import Persistence, WindowTracker
from moevement_ext.replicate.secret import CoordinatorSecrets
from tests.unit.coordinator.served import KeptHere

SECRETS = CoordinatorSecrets(b'l' * 32, b'0' * 32)


class Promising:
    """All ranks in one round, each with one process.

    The process of rank 0 keeps the coordinator, unless the launcher has `kept` it.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, size: int, kept: KeptHere | None = None
    ) -> None:
        numbers = itertools.count(1)
        monkeypatch.setattr(persistence, 'Keeper', KeptHere)
        monkeypatch.setattr(persistence, 'own_process', lambda: 2 ** next(numbers))
        monkeypatch.setattr(coordinator_client, '_PAUSES_S', (0.01, 0.05))
        self.size, self.round = size, 0
        self._kept, self._at_start = kept, list[bytes]()
        if kept is not None:
            monkeypatch.setenv(COORDINATOR, f':{kept.address[1]}')
        self.ranks = [self._process(rank) for rank in range(size)]
        self.former: list[Persistence] = []

    def _process(self, rank: int) -> Persistence:
        known: Any = SimpleNamespace(
            number=rank,
            world_size=self.size,
            exchange=self._exchange,
            config=SparseCheckpointConfig(),
        )
        return Persistence(known, '127.0.0.1', SECRETS)

    def _exchange(self, name: str, own: bytes) -> list[bytes]:
        self._at_start.append(own)
        return self._at_start[:1] * self.size

    @property
    def keeper(self) -> KeptHere:
        keeper: Any = self._kept or self.ranks[0]._keeper
        return keeper

    @property
    def processes(self) -> list[Any]:
        return [
            SimpleNamespace(process=one._hello.token, coordinator=one.coordinator)
            for one in self.ranks
        ]

    def replace(self, rank: int) -> None:
        """Another process of a rank that is dead, or stands still; the others leave the round."""
        self.former.append(self.ranks[rank])
        self.ranks[rank] = self._process(rank)

    def enter(self) -> None:
        self.round += 1
        for one in self.ranks:
            one.enter(self.round, self.processes)

    def leave(self) -> None:
        for one in self.ranks:
            one.leave()

    def tracker(
        self, rank: int, name: str, on_agreed: Callable[[Agreed], None], kept: int = 1
    ) -> WindowTracker:
        return WindowTracker(self.ranks[rank], name, on_agreed, kept)

    def close(self) -> None:
        for one in [*self.ranks, *self.former]:
            one.close()
