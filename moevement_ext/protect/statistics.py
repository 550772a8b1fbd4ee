# SPDX-License-Identifier: Apache-2.0
"""Figures of protection for the log line and the metrics."""

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from moevement_ext.events import EventLog
from moevement_ext.rates import timed

# Seconds of training with one failure, before this job has shown its own rate.
_PRIOR_S = 3600.0


@dataclass
class Figures:
    """Figures of one rank; counts and seconds since the start of the process."""

    iteration: int = 0
    window: int = 0
    """Iterations per window in force."""
    committed: int | None = None
    """Start of the newest own window complete in host memory."""
    persisted: int | None = None
    """Start of the newest window that every rank and its holders have."""
    training_s: float = 0.0
    """Seconds in committed iterations, without replays."""
    exposed_s: float = 0.0
    """Seconds by which sparse checkpointing delayed training, including waits."""
    device_wait_s: float = 0.0
    """Seconds in which the training thread waited for the device around updates.

    The device computes meanwhile; only work that could have been queued ahead is delayed.
    """
    own_s: float = 0.0
    """Seconds of `training_s` without waits for other ranks and for checkpointing."""
    waits_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of `training_s` in waits, by the rank waited for; `group`: for several."""
    iterations: int = 0
    """Iterations that reached their update."""
    captured_bytes: int = 0
    slot_bytes: int = 0
    skipped_windows: int = 0
    """Windows skipped for lack of a free file."""
    copy_bytes_per_s: float | None = None
    """Measured rate of the copies of the newest slots; None before the first."""
    host_memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes that this rank reserves, by kind."""
    disk_bytes: int | None = None
    ended_at: float | None = None
    """Time of the end of the newest iteration, in seconds since the epoch."""
    durations: deque[float] = field(default_factory=partial(deque, maxlen=1000))
    """Seconds of iterations of `training_s` that the metrics have not taken out yet."""

    @property
    def window_age(self) -> int | None:
        """Iterations since the persisted window began."""
        return self._after_persisted(self.iteration)

    @property
    def replication_lag(self) -> int | None:
        """Iterations from the start of the persisted window to that of the newest own one."""
        return self._after_persisted(self.committed)

    def _after_persisted(self, iteration: int | None) -> int | None:
        if iteration is None or self.persisted is None:
            return None
        # The persisted window of a joining rank may be newer than the rank's own iteration.
        return max(iteration - self.persisted, 0)


class CaptureStatistics(Figures):
    """Counters of one rank; each but `failures` is written by one thread only.

    `failures` is the number of reductions of protection, `on_disk` the start of the newest window
    that every rank has on disk, `persist_s` the seconds of the newest successful copy to disk.
    """

    def __init__(self, events: EventLog) -> None:
        super().__init__()
        self.events = events
        self.failures = 0
        self.on_disk: int | None = None
        self.persist_s: float | None = None
        self._reported = 0.0, 0
        self._observed_s = 0.0

    def device_wait(self) -> AbstractContextManager[None]:
        """Context whose duration counts as a wait for the device. Training thread."""
        return timed(self, 'device_wait_s')

    def exposed_ms(self) -> float:
        """Milliseconds exposed per iteration since the last call. Training thread."""
        seconds, iterations = self._reported
        self._reported = self.exposed_s, self.iterations
        return 1000 * (self.exposed_s - seconds) / max(self.iterations - iterations, 1)

    def waited_s(self) -> float:
        """Seconds exposed since the last call. Training thread."""
        before, self._observed_s = self._observed_s, self.exposed_s
        return self.exposed_s - before

    def failures_per_s(self) -> float:
        """Expected failures per second of training: as seen, beside one in a first hour."""
        return (1 + self.events.recoveries) / (_PRIOR_S + self.training_s)

    def degraded(self, reason: str) -> None:
        """Record and log that protection is reduced. Any thread."""
        self.failures += 1
        self.events.reduced(reason)
