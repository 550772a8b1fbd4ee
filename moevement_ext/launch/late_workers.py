# SPDX-License-Identifier: Apache-2.0
"""Detects replacements that hang before they join the other ranks, which cannot see them yet."""

import time
from collections.abc import Sequence

from torch.distributed import Store

from moevement_ext.launch.statements import told_joining, told_survivors
from moevement_ext.launch.worker import Worker

# Seconds to import a program; survivors wait longer.
_TO_JOIN_S = 300.0


class LateWorkers:
    """Ages of the processes that have not joined yet. One thread uses it."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}
        # Process ids, by rank, that have joined or were killed.
        self._settled: dict[int, int] = {}

    def late(self, store: Store, living: Sequence[Worker]) -> list[Worker]:
        """Return the workers to kill, each once, for which the other ranks wait in vain.

        Sends no request to the store before a worker can be late. No worker is late at the start
        of a job, which may take long.

        Args:
            store: the part of the store that belongs to this launch.
            living: workers that have not ended.

        Raises:
            DistError: the store does not answer.
        """
        now = time.monotonic()
        overdue = [worker for worker in living if self._age_s(worker, now) > _TO_JOIN_S]
        if not (overdue and any(worker.restarts for worker in living) and told_survivors(store)):
            return []
        late = [worker for worker in overdue if told_joining(store, worker.rank) != worker.pid]
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
