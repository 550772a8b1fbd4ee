# SPDX-License-Identifier: Apache-2.0
"""Names and sources of all metrics. The names are stable, as dashboards depend on them."""

from collections.abc import Iterator, Mapping, Sized
from typing import Any, NamedTuple

from moevement_ext.events import (
    Event,
    FailureDetected,
    Finished,
    JobDescribed,
    LossLogged,
    NextTier,
    ProtectionReduced,
    Recovered,
    WindowCommitted,
    WindowOnDisk,
    WindowPersisted,
)


class Instrument(NamedTuple):
    """One metric of every rank."""

    name: str
    """Name in Prometheus style; the exporter appends `_total` to counters."""
    counts: bool
    """True for a counter, which begins at 0 in each process of a rank; False for a gauge."""
    help: str
    field: str | None = None
    """Field of an event or of `Figures` with the value, or values by label; None: 1."""
    event: type[Event] | None = None
    """Event class with the field; None: `Figures`, if there is a field."""
    label: str | None = None
    """Label that distinguishes values of one rank; unless `field` has labels, also a field."""

    @property
    def reads_figures(self) -> bool:
        return self.event is None and self.field is not None

    def values(self, source: object) -> Iterator[tuple[str | None, float]]:
        """Labels and values from one event or from figures; empty if unknown."""
        value: Any = 1 if self.field is None else getattr(source, self.field)
        if isinstance(value, Mapping):
            yield from value.items()
        elif value is not None:
            own = None if self.label is None else getattr(source, self.label)
            yield own, len(value) if isinstance(value, Sized) else value


def _sum(name: str, help_: str, *taken: Any) -> Instrument:
    return Instrument(f'moevement_{name}', True, help_, *taken)


def _state(name: str, help_: str, *taken: Any) -> Instrument:
    return Instrument(f'moevement_{name}', False, help_, *taken)


_AGE = 'Iterations since the start of the newest window that all ranks and holders have.'
_LAG = 'Start of the newest own window minus that of the newest on all ranks and holders.'
_LOSS = 'Finite loss that the trainer logged last, on the rank that logs.'
_FINITE = '1 if the loss that the trainer logged last is finite, else 0.'
_LAYOUT = 'Ranks of the job by kind of parallelism, on rank 0.'
_VERIFIED = 'Operators compared with captures after a recovery.'
_DIFFERING = 'Operators, losses and gradient norms that differed after a recovery.'

TARGET = _state('train_iterations', 'Iteration at which training ends.')
FINISHED = _state('finished', '1 once this process has ended as planned, else 0.', None, Finished)
INSTRUMENTS = (
    _state('iteration', 'Newest iteration committed on this rank.', 'iteration'),
    TARGET,
    FINISHED,
    _state('layout_ranks', _LAYOUT, 'layout', JobDescribed, 'kind'),
    _state('loss', _LOSS, 'loss', LossLogged),  # the library drops values that are not finite
    _state('loss_finite', _FINITE, 'finite', LossLogged),
    _state('window_iterations', 'Iterations per window in force.', 'window'),
    _state('window_age_iterations', _AGE, 'window_age'),
    _state('replication_lag_iterations', _LAG, 'replication_lag'),
    _state('slot_bytes', 'Payload of the newest slot of this rank.', 'slot_bytes'),
    _state('copy_bytes_per_second', 'Measured rate of copies to host memory.', 'copy_bytes_per_s'),
    _state('host_memory_bytes', 'Bytes that this rank reserves.', 'host_memory', None, 'kind'),
    _state('disk_bytes', 'Bytes of the windows of this rank on disk.', 'disk_bytes'),
    _sum('training_seconds', 'Seconds in committed iterations, without replays.', 'training_s'),
    _sum('exposed_seconds', 'Delay of training by sparse checkpointing.', 'exposed_s'),
    _sum('device_wait_seconds', 'Waits for the GPU around updates.', 'device_wait_s'),
    _sum('iterations', 'Iterations that reached their update.', 'iterations'),
    _sum('captured_bytes', 'Payload of the captured slots.', 'captured_bytes'),
    _sum('skipped_windows', 'Windows skipped for lack of a free file.', 'skipped_windows'),
    _sum('windows_committed', 'Windows complete in memory of this rank.', None, WindowCommitted),
    _sum('windows_persisted', 'Windows that all ranks and holders have.', None, WindowPersisted),
    _sum('windows_on_disk', 'Windows that all ranks have on disk.', None, WindowOnDisk),
    _sum('protection_reduced', 'Reductions of protection.', None, ProtectionReduced),
    _sum('failures_detected', 'Failures that this rank detected.', None, FailureDetected),
    _sum('recoveries', 'Recoveries that this rank took part in.', 'by_scope', Recovered, 'scope'),
    _sum('recovery_seconds', 'Time in recoveries on this rank.', 'seconds', Recovered, 'phase'),
    _sum('replayed_iterations', 'Iterations recomputed in recoveries.', 'replayed', Recovered),
    _sum('verified_operators', _VERIFIED, 'verified', Recovered),
    _sum('differing_operators', _DIFFERING, 'differing', Recovered),
    _sum('next_tier', 'Recoveries that abandoned a source.', None, NextTier, 'tier'),
)
