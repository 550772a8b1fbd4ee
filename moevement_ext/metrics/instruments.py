# SPDX-License-Identifier: Apache-2.0
"""What is measured, by name; names stay, since dashboards and alerts use them."""

import enum
from typing import NamedTuple, Protocol


class Kind(enum.Enum):
    """What becomes of values over time."""

    COUNTER = 'counter'
    """They are added up over the lives of a rank, from 0 on."""
    GAUGE = 'gauge'
    """The newest one replaces those before it."""


class Instrument(NamedTuple):
    """One thing that is measured, of every rank."""

    name: str
    """Name by the rules of Prometheus, whose exporter appends `_total` to counters."""
    kind: Kind
    help: str
    label: str | None = None
    """What tells its values of one rank apart."""


def _counter(name: str, help_: str, label: str | None = None) -> Instrument:
    return Instrument(f'moevement_{name}', Kind.COUNTER, help_, label)


def _gauge(name: str, help_: str, label: str | None = None) -> Instrument:
    return Instrument(f'moevement_{name}', Kind.GAUGE, help_, label)


ITERATION = _gauge('iteration', 'Newest iteration committed on this rank.')
TARGET = _gauge('train_iterations', 'Iteration at which training ends.')
FINISHED = _gauge('finished', '1 once this process has ended as planned, else 0.')
LOSS = _gauge('loss', 'Loss that the trainer logged last, on the rank that logs.')
WINDOW = _gauge('window_iterations', 'Iterations per window in force.')
WINDOW_AGE = _gauge(
    'window_age_iterations', 'Iterations since the newest window that all ranks and holders have.'
)
REPLICATION_LAG = _gauge(
    'replication_lag_iterations',
    'Start of the newest own window minus that of the newest one that all ranks and holders have.',
)
SLOT_BYTES = _gauge('slot_bytes', 'Payload of the newest slot of this rank.')
COPY_RATE = _gauge('copy_bytes_per_second', 'Measured rate of copies to host memory.')
HOST_MEMORY = _gauge('host_memory_bytes', 'Reserved by this rank in host memory.', 'kind')
DISK = _gauge('disk_bytes', 'That windows of this rank take on disk.')

TRAINING = _counter('training_seconds', 'In iterations that were committed; not in replays.')
EXPOSED = _counter('exposed_seconds', 'By which sparse checkpointing held up training.')
ITERATIONS = _counter('iterations', 'Iterations that came to their update.')
CAPTURED = _counter('captured_bytes', 'Payload of the slots that were captured.')
SKIPPED = _counter('skipped_windows', 'Windows for which there was no free file.')
COMMITTED = _counter('windows_committed', 'Windows complete in the host memory of this rank.')
PERSISTED = _counter('windows_persisted', 'Windows that all ranks and holders have.')
ON_DISK = _counter('windows_on_disk', 'Windows that all ranks have on disk.')
REDUCED = _counter('protection_reduced', 'Times that training went on with less protection.')
FAILURES = _counter('failures_detected', 'Failures of any rank that this one noticed.')
RECOVERIES = _counter('recoveries', 'Recoveries that this rank took part in.', 'scope')
RECOVERY = _counter('recovery_seconds', 'In recoveries, on this rank.', 'phase')
REPLAYED = _counter('replayed_iterations', 'Iterations computed again to recover.')
VERIFIED = _counter('verified_operators', 'Operators compared with captures after a recovery.')
DIFFERING = _counter(
    'differing_operators',
    'Operators whose recovered state was another, and losses or gradient norms.',
)
NEXT_TIER = _counter('next_tier', 'Recoveries that gave up what they tried.', 'tier')
DEVICE_PROBLEMS = _counter('device_problems', 'Signs that the GPU of this rank fails.', 'harm')

INSTRUMENTS = tuple(value for value in list(globals().values()) if isinstance(value, Instrument))
"""All of them."""


class Recorder(Protocol):
    """Takes values of one rank to where they are read. Any thread may call it."""

    def add(self, instrument: Instrument, amount: float, label: str | None = None) -> None:
        """Add to a counter."""

    def set(self, instrument: Instrument, value: float, label: str | None = None) -> None:
        """Replace the value of a gauge."""

    def close(self) -> None:
        """The process ends well; nothing is added or set any more."""
