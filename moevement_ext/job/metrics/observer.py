# SPDX-License-Identifier: Apache-2.0
"""Converts events and statistics of this rank into metrics."""

import atexit
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from moevement_ext.config import ConfigurationError, node_name
from moevement_ext.events import Event, WindowCommitted
from moevement_ext.job.metrics import readers
from moevement_ext.job.metrics.instruments import FINISHED, INSTRUMENTS, TARGET, Instrument
from moevement_ext.logger import logger_of
from moevement_ext.membership.rank import Rank
from moevement_ext.protect.statistics import Figures

logger = logger_of(__name__)


def observe(rank: Rank) -> 'Observer | None':
    """Start recording metrics of a rank; None if no exporter is configured.

    Raises `ConfigurationError` if the library of `--sparse-ckpt-metrics` is missing. A process
    that joins a running job only logs a warning.
    """
    port, chosen = None, []
    if rank.config.metrics is not None:
        try:
            port = readers.Port(rank.config.metrics + int(os.environ.get('LOCAL_RANK', '0')))
            chosen.append(port.reader)
        except ConfigurationError as error:
            # The library may be missing on this node only, and the job waits for this process.
            if not rank.exchange.joining:
                raise
            logger.warning('no metrics for Prometheus: %s', error)
    if readers.otlp_is_wanted():
        try:
            chosen.append(readers.otlp())
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
        self, labels: dict[str, Any], readers: list[Any], port: readers.Port | None = None
    ) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource

        self._labels = labels
        self._port = port
        self._figures: Callable[[], Figures] | None = None
        # By default a random id of the process, which begins new series in Prometheus.
        instance = {'service.instance.id': f'{labels["run"]}/{labels["rank"]}'}
        # The library's own function at exit would close it before the job has finished.
        self._provider = MeterProvider(readers, Resource.create(instance), shutdown_on_exit=False)
        atexit.register(self._provider.force_flush)  # a failing process does not close it
        meter = self._provider.get_meter('moevement')
        self._record: dict[Instrument, Callable[..., None]] = {}
        for one in INSTRUMENTS:
            if one.reads_figures:
                make: Any = meter.create_observable_gauge
                if one.counts:
                    make = meter.create_observable_counter
                make(one.name, [partial(self._read, one)], description=one.help)
            elif one.counts:
                self._record[one] = meter.create_counter(one.name, description=one.help).add
                if one.label is None:
                    # The rate of a counter that begins at 1 would miss the first event.
                    self._set(one, 0)
            else:
                self._record[one] = meter.create_gauge(one.name, description=one.help).set
        if port is not None:
            port.open()

    def event(self, event: Event) -> None:
        try:
            for one in self._record:
                if one.event is type(event):
                    for label, value in one.values(event):
                        self._set(one, value, label)
            if self._port is not None and isinstance(event, WindowCommitted):
                self._port.open()
        except Exception:
            logger.exception('an event is missing in the metrics')

    def watch(self, figures: Callable[[], Figures], last_iteration: int) -> None:
        """Show these figures from now on; any thread calls `figures`."""
        self._set(TARGET, last_iteration)
        self._set(FINISHED, 0)
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
        """Add the value to a counter; set a gauge to it."""
        self._record[instrument](value, self._labelled(instrument, label))

    def _labelled(self, instrument: Instrument, label: str | None) -> dict[str, Any]:
        return self._labels | ({} if instrument.label is None else {instrument.label: label})

    def _read(self, instrument: Instrument, options: object) -> Iterator[Any]:
        from opentelemetry.metrics import Observation

        if self._figures is None and not instrument.counts:
            return
        figures = Figures() if self._figures is None else self._figures()
        for label, value in instrument.values(figures):
            yield Observation(value, self._labelled(instrument, label))
