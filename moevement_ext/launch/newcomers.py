# SPDX-License-Identifier: Apache-2.0
"""Replacements that hang before they join the others, who cannot know of them yet."""

import time
from collections.abc import Sequence

from torch.distributed import Store

from moevement_ext.launch.statements import told_joining, told_survivors
from moevement_ext.launch.worker import Worker

_TO_JOIN_S = 300.0
"""To import a program; survivors wait for longer."""


class Newcomers:
    """Which processes have not joined yet, and since when. One thread uses it."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}
        self._settled: dict[int, int] = {}
        """Processes, by rank, that have joined or are killed."""

    def late(self, store: Store, living: Sequence[Worker]) -> list[Worker]:
        """Workers that are to be killed, each once, since others wait for them in vain.

        Asks nothing of the store before somebody could be late. At the start of a job, which may
        take long, nobody is.

        Args:
            store: that part of it that the launch has.
            living: workers.

        Raises:
            DistError: the store is not reached.
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
