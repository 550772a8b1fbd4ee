# SPDX-License-Identifier: Apache-2.0
"""Metrics for operators of a cluster: names and sources, and the readers of OpenTelemetry.

The names are stable, as dashboards depend on them. Prometheus scrapes a port of each process; OTLP
goes to a collector, for which the library reads endpoint, headers, interval and resource from the
environment (`OTEL_EXPORTER_OTLP_ENDPOINT`...).
"""

import atexit
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from typing import Any, NamedTuple

from moevement_ext import __version__
from moevement_ext.config import ConfigurationError, is_guest, node_name
from moevement_ext.events import (
    DenseSaveFailed,
    Event,
    FailureDetected,
    Finished,
    JobDescribed,
    LossLogged,
    NextTier,
    ProtectionReduced,
    Recovered,
    SlowRank,
    WindowCommitted,
    WindowOnDisk,
    WindowPersisted,
)
from moevement_ext.logger import logger_of
from moevement_ext.membership.rank import Rank
from moevement_ext.protect.statistics import Figures

logger = logger_of(__name__)


_UNITS = {'_bytes_per_second': 'By/s', '_seconds': 's', '_bytes': 'By'}
_BOUNDS_S = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]  # of histograms
_ADVICE = 'explicit_bucket_boundaries_advisory'
_RECORD = {'counter': 'add', 'gauge': 'set', 'histogram': 'record'}


class Instrument(NamedTuple):
    """One metric of every rank."""

    name: str
    """Name in Prometheus; the exporter appends `_total` to counters."""
    kind: str
    """`counter`, which begins at 0 in each process of a rank, `gauge` or `histogram`."""
    help: str
    field: str | None = None
    """Field of an event or of `Figures` with the value, or values by label; None: 1."""
    event: type[Event] | None = None
    """Event class with the field; None: `Figures`, if there is a field."""
    label: str | None = None
    """Label that distinguishes values of one rank; unless `field` has labels, also a field."""

    @property
    def dotted(self) -> tuple[str, str]:
        """Name and unit of OpenTelemetry; exporters make `name` of both."""
        suffix = next((one for one in _UNITS if self.name.endswith(one)), '')
        return self.name.removesuffix(suffix).replace('_', '.', 1), _UNITS.get(suffix, '')

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
    return Instrument(f'moevement_{name}', 'counter', help_, *taken)


def _state(name: str, help_: str, *taken: Any) -> Instrument:
    return Instrument(f'moevement_{name}', 'gauge', help_, *taken)


def _spread(name: str, help_: str, *taken: Any) -> Instrument:
    return Instrument(f'moevement_{name}', 'histogram', help_, *taken)


_AGE = 'Iterations since the start of the newest window that all ranks and holders have.'
_LAG = 'Start of the newest own window minus that of the newest on all ranks and holders.'
_LOSS = 'Finite loss that the trainer logged last, on the rank that logs.'
_FINITE = '1 if the loss that the trainer logged last is finite, else 0.'
_OWN = 'Seconds of computing in committed iterations, without waits for other ranks.'
_WAITS = 'Waits for other ranks in committed iterations, by the rank waited for.'
_SLOW = 'Own seconds per iteration of a slow rank, by the median of its stage, on rank 0.'
_LAST = 'Time of the end of the newest iteration, in seconds since the epoch.'
_RECOVERY = 'Seconds of a recovery on this rank, all its phases.'
_LAYOUT = 'Ranks of the job by kind of parallelism, on rank 0.'
_VERIFIED = 'Operators compared with captures after a recovery.'
_DIFFERING = 'Operators, losses and gradient norms that differed after a recovery.'

TARGET = _state('train_iterations', 'Iteration at which training ends.')
GUEST = _state(
    'guest', '1 if the node of this rank is lost, and it works on that of others, else 0.'
)
FINISHED = _state('finished', '1 once this process has ended as planned, else 0.', None, Finished)
BUILD = _state('build_info', 'Version of this package; always 1.', None, None, 'version')
DURATION = _spread('iteration_duration_seconds', 'Seconds of an iteration, without replays.')
INSTRUMENTS = (
    BUILD,
    _state('iteration', 'Newest iteration committed on this rank.', 'iteration'),
    _state('last_iteration_timestamp_seconds', _LAST, 'ended_at'),
    TARGET,
    FINISHED,
    GUEST,
    _state('layout_ranks', _LAYOUT, 'layout', JobDescribed, 'kind'),
    _state('slow_rank_ratio', _SLOW, 'ratio', SlowRank, 'slow'),
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
    _sum('own_seconds', _OWN, 'own_s'),
    _sum('wait_seconds', _WAITS, 'waits_s', None, 'of'),
    _sum('exposed_seconds', 'Delay of training by sparse checkpointing.', 'exposed_s'),
    _sum('device_wait_seconds', 'Waits for the GPU around updates.', 'device_wait_s'),
    DURATION,
    _sum('iterations', 'Iterations that reached their update.', 'iterations'),
    _sum('captured_bytes', 'Payload of the captured slots.', 'captured_bytes'),
    _sum('skipped_windows', 'Windows skipped for lack of a free file.', 'skipped_windows'),
    _sum('windows_committed', 'Windows complete in memory of this rank.', None, WindowCommitted),
    _sum('windows_persisted', 'Windows that all ranks and holders have.', None, WindowPersisted),
    _sum('windows_on_disk', 'Windows that all ranks have on disk.', None, WindowOnDisk),
    _sum('protection_reduced', 'Reductions of protection.', None, ProtectionReduced),
    _sum('dense_saves_failed', 'Dense checkpoints not written.', None, DenseSaveFailed),
    _sum('failures_detected', 'Failures that this rank detected.', None, FailureDetected),
    _sum('recoveries', 'Recoveries that this rank took part in.', 'by_scope', Recovered, 'scope'),
    _sum('recovery_seconds', 'Time in recoveries on this rank.', 'seconds', Recovered, 'phase'),
    _spread('recovery_duration_seconds', _RECOVERY, 'total_s', Recovered),
    _sum('replayed_iterations', 'Iterations recomputed in recoveries.', 'replayed', Recovered),
    _sum('verified_operators', _VERIFIED, 'verified', Recovered),
    _sum('differing_operators', _DIFFERING, 'differing', Recovered),
    _sum('next_tier', 'Recoveries that abandoned a source.', None, NextTier, 'tier'),
)


_ENDPOINTS = ('OTEL_EXPORTER_OTLP_METRICS_ENDPOINT', 'OTEL_EXPORTER_OTLP_ENDPOINT')
_PROTOCOLS = ('OTEL_EXPORTER_OTLP_METRICS_PROTOCOL', 'OTEL_EXPORTER_OTLP_PROTOCOL')
_HTTP = 'http/protobuf'


class Port:
    """The port of one process for Prometheus; `reader` collects what it serves.

    Children drop the port (`system.forks`). Raises `ConfigurationError` if the library is missing
    or disabled.
    """

    def __init__(self, number: int) -> None:
        if _is_disabled():
            raise ConfigurationError(
                '--sparse-ckpt-metrics: OTEL_SDK_DISABLED=true switches off the library of '
                'metrics. Unset the variable for this job, or leave the flag out.'
            )
        try:
            from opentelemetry.exporter.prometheus import PrometheusMetricReader
            from prometheus_client import CollectorRegistry
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                '--sparse-ckpt-metrics needs the package opentelemetry-exporter-prometheus: pip '
                'install it on all nodes, or leave the flag out.'
            ) from error
        self._number = number
        self._registry = CollectorRegistry()
        self.reader: Any = PrometheusMetricReader(
            disable_target_info=True, scope_info_enabled=False, registry=self._registry
        )
        self._served: tuple[Any, Any] | None = None
        self._is_told = False

    def open(self) -> None:
        """Serve on all interfaces, unless the port is open, or taken; call this repeatedly.

        The predecessor of this process may have the port until the kernel has ended it.
        """
        from prometheus_client import start_http_server

        if self._served is not None:
            return
        everywhere = '::' if socket.has_dualstack_ipv6() else '0.0.0.0'
        try:
            self._served = start_http_server(self._number, everywhere, self._registry)
        except (OSError, OverflowError) as error:
            if not self._is_told:
                self._is_told = True
                logger.warning(
                    '--sparse-ckpt-metrics: Prometheus cannot read this rank, since it cannot '
                    'listen at port %d (the flag plus LOCAL_RANK): %s. It tries again after each '
                    'window; else give each run of a host other ports.',
                    self._number,
                    error,
                )

    def close(self) -> None:
        if self._served is not None:
            server, thread = self._served
            server.shutdown()
            server.server_close()
            thread.join()


def otlp_is_wanted() -> bool:
    exporter = os.environ.get('OTEL_METRICS_EXPORTER', 'otlp')
    named = any(os.environ.get(name) for name in _ENDPOINTS)
    return named and not _is_disabled() and exporter == 'otlp'


def otlp() -> Any:
    """Create the reader that sends values over OTLP on its own thread.

    Raises `ConfigurationError` if the library is missing, or if the environment selects another
    protocol than HTTP, although the library speaks HTTP only and ignores these variables.
    """
    name = next((name for name in _PROTOCOLS if os.environ.get(name)), None)
    if name is not None and os.environ[name] != _HTTP:
        raise ConfigurationError(
            f'{name}={os.environ[name]}: metrics go over {_HTTP} only. Set {_PROTOCOLS[0]}={_HTTP} '
            f'and {_ENDPOINTS[0]} to where the collector takes HTTP, as '
            'http://HOST:4318/v1/metrics.'
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import (
            MetricExportResult,
            PeriodicExportingMetricReader,
        )
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f'{_ENDPOINTS[1]} is set, but OpenTelemetry is not installed: pip install '
            'opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, or unset the variable '
            'for this job.'
        ) from error
    own = os.getpid()

    class Exporter(OTLPMetricExporter):
        """Sends nothing in forks, which have the counts of their parent; the reader forks along."""

        def export(self, *args: Any, **named: Any) -> MetricExportResult:
            here = os.getpid() == own
            return super().export(*args, **named) if here else MetricExportResult.SUCCESS

    return PeriodicExportingMetricReader(Exporter())


def _is_disabled() -> bool:
    """True if the environment disables the library, which then drops all values."""
    return os.environ.get('OTEL_SDK_DISABLED', '').strip().lower() == 'true'


def observe(rank: Rank) -> 'Observer | None':
    """Start recording metrics of a rank; None if no exporter is configured.

    Raises `ConfigurationError` if the library of `--sparse-ckpt-metrics` is missing. A process
    that joins a running job only logs a warning.
    """
    port, chosen = None, []
    if rank.config.metrics is not None:
        try:
            port = Port(rank.config.metrics + int(os.environ.get('LOCAL_RANK', '0')))
            chosen.append(port.reader)
        except ConfigurationError as error:
            # The library may be missing on this node only, and the job waits for this process.
            if not rank.exchange.joining:
                raise
            logger.warning('no metrics for Prometheus: %s', error)
    if otlp_is_wanted():
        try:
            chosen.append(otlp())
        except ConfigurationError as error:  # the variables may be meant for other programs
            logger.warning('no metrics over OTLP: %s', error)
    if not chosen:
        return None
    labels = {'run': rank.run_id, 'node': node_name(), 'rank': rank.number}
    observer = Observer(labels, chosen, port)
    rank.events.listeners.append(observer.event)
    return observer


class Observer:
    """Counts events of this rank; `readers` collect its figures when they need them. Any thread.

    `labels` are those of all values. No error reaches training (invariant I6).
    """

    def __init__(
        self, labels: dict[str, Any], readers: list[Any], port: Port | None = None
    ) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource

        self._labels = labels
        self._port = port
        self._figures: Callable[[], Figures] | None = None
        # An instance is by default a random id of the process: new series in Prometheus.
        named = {
            'service.name': 'moevement',
            'host.name': socket.gethostname(),
            **OTELResourceDetector().detect().attributes,
            'service.instance.id': f'{labels["run"]}/{labels["rank"]}',
        }
        # The library's own function at exit would close it before the job has finished.
        self._provider = MeterProvider(readers, Resource.create(named), shutdown_on_exit=False)
        atexit.register(self._provider.force_flush)  # a failing process does not close it
        meter = self._provider.get_meter('moevement', __version__)
        self._record: dict[Instrument, Callable[..., None]] = {}
        for one in INSTRUMENTS:
            name, unit = one.dotted
            if one.reads_figures:
                make = getattr(meter, f'create_observable_{one.kind}')
                make(name, [partial(self._read, one)], unit, one.help)
                continue
            bounds = {} if one.kind != 'histogram' else {_ADVICE: _BOUNDS_S}
            made = getattr(meter, f'create_{one.kind}')(name, unit, one.help, **bounds)
            self._record[one] = getattr(made, _RECORD[one.kind])
            if one.kind == 'counter' and one.label is None:
                # The rate of a counter that begins at 1 would miss the first event.
                self._set(one, 0)
        self._set(BUILD, 1, __version__)
        if port is not None:
            port.open()

    def event(self, event: Event) -> None:
        try:
            for one in self._record:
                if one.event is type(event):
                    for label, value in one.values(event):
                        self._set(one, value, label)
            if isinstance(event, WindowCommitted):
                durations = (self._figures or Figures)().durations
                while durations:
                    self._set(DURATION, durations.popleft())
                if self._port is not None:
                    self._port.open()
        except Exception:
            logger.exception('an event is missing in the metrics')

    def watch(self, figures: Callable[[], Figures], last_iteration: int) -> None:
        """Show these figures from now on; any thread calls `figures`."""
        self._set(TARGET, last_iteration)
        self._set(FINISHED, 0)
        self._set(GUEST, int(is_guest()))
        self._figures = figures

    def close(self) -> None:
        """Send the last values over OTLP and stop."""
        try:
            self._provider.shutdown()
            if self._port is not None:
                self._port.close()
        except Exception:
            logger.exception('the last metrics may be missing')

    def _set(self, instrument: Instrument, value: float, label: str | None = None) -> None:
        """Add the value to a counter or a histogram; set a gauge to it."""
        self._record[instrument](value, self._labelled(instrument, label))

    def _labelled(self, instrument: Instrument, label: str | None) -> dict[str, Any]:
        return self._labels | ({} if instrument.label is None else {instrument.label: label})

    def _read(self, instrument: Instrument, options: object) -> Iterator[Any]:
        from opentelemetry.metrics import Observation

        if self._figures is None and instrument.kind == 'gauge':
            return
        for label, value in instrument.values((self._figures or Figures)()):
            yield Observation(value, self._labelled(instrument, label))
