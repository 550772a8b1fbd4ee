# SPDX-License-Identifier: Apache-2.0
"""Detects replacements that hang before the rendezvous, where other ranks cannot detect them."""

import time
from collections.abc import Sequence

from torch.distributed import Store

from moevement_ext.launch.statements import told_joining, told_survivors
from moevement_ext.launch.worker import Worker

# Limit for a replacement to import the program and join; survivors wait longer.
_TO_JOIN_S = 300.0


class LateWorkers:
    """Ages of the processes that have not joined yet. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}
        # Ids of the processes that have joined or were killed, by rank.
        self._settled: dict[int, int] = {}

    def late(self, store: Store, living: Sequence[Worker]) -> list[Worker]:
        """Return the workers that have not joined in time and must be killed, each worker once.

        Sends no request to the store before a worker can be late. The first process of a rank
        that joins may take any time: a cold start of the whole job may take long. `store` is
        the part of this launch; raises `DistError` if it does not answer.
        """
        now = time.monotonic()
        overdue = [worker for worker in living if self._age_s(worker, now) > _TO_JOIN_S]
        if not (overdue and any(worker.restarts for worker in living) and told_survivors(store)):
            return []
        joined = {worker.rank: told_joining(store, worker.rank) for worker in overdue}
        late = [worker for worker in overdue if joined[worker.rank] not in (None, worker.pid)]
        self._settled |= {worker.rank: worker.pid for worker in overdue}
        return late

    def _age_s(self, worker: Worker, now: float) -> float:
        if not worker.pid or self._settled.get(worker.rank) == worker.pid:
            return 0.0
        pid, since = self._seen.get(worker.rank, (0, now))
        if pid != worker.pid:
            self._seen[worker.rank] = worker.pid, now
            return 0.0
        return now - since
