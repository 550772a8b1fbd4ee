# SPDX-License-Identifier: Apache-2.0
"""Converts events and statistics of this rank into metrics."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from moevement_ext.config import ConfigurationError, node_name
from moevement_ext.errors import HostMemoryError
from moevement_ext.events import Event, LossLogged, WindowCommitted, WindowPersisted
from moevement_ext.job.metrics import meter as meters
from moevement_ext.job.metrics.host import Host
from moevement_ext.job.metrics.instruments import FINISHED, INSTRUMENTS, TARGET
from moevement_ext.job.metrics.meter import Meter
from moevement_ext.membership.rank import Rank
from moevement_ext.protect.statistics import Figures

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
# Events of fault-free training, published within a second. Other events are published at once, as
# the process may end right after them.
_ORDINARY = (LossLogged, WindowCommitted, WindowPersisted)


def observe(rank: Rank) -> 'Observer | None':
    """Start recording metrics of a rank; None if no exporter is configured.

    Raises `ConfigurationError` if the library of `--sparse-ckpt-metrics` is missing. A process
    that joins a running job only logs a warning.
    """
    config, host, readers = rank.config, None, []
    if config.metrics is not None:
        try:
            host = Host(config.metrics, Path(config.dir), rank.run_id)
            readers.append(host.reader)
        except (ConfigurationError, HostMemoryError, OSError) as error:
            # The library may be missing on this node only, and the job waits for this process.
            if isinstance(error, ConfigurationError) and not rank.exchange.joining:
                raise
            logger.warning('no metrics for Prometheus: %s', error)
    if meters.otlp_is_wanted():
        try:
            readers.append(meters.otlp())
        except ConfigurationError as error:  # the variables may be meant for other programs
            logger.warning('no metrics over OTLP: %s', error)
    if not readers:
        return None
    labels = {'run': rank.run_id, 'node': node_name(), 'rank': rank.number}
    observer = Observer(Meter(labels, readers), host)
    rank.events.listeners.append(observer.event)
    return observer


class Observer:
    """Records events of this rank, and once a second the statistics of its protection.

    `host` serves the values of `meter` to Prometheus, if given. The training thread only counts
    rare events; no error reaches training (invariant I6).
    """

    def __init__(self, meter: Meter, host: Host | None = None) -> None:
        self._meter = meter
        self._host = host
        self._before = Figures()
        self._figures: Callable[[], Figures] | None = None
        for instrument in INSTRUMENTS:
            if instrument.counts and instrument.label is None:
                # The rate of a counter that begins at 1 would miss the first event.
                meter.record(instrument, 0)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name='metrics', daemon=True)
        self._thread.start()

    def event(self, event: Event) -> None:
        try:
            for instrument in INSTRUMENTS:
                if instrument.event is type(event):
                    for label, value in instrument.values(event):
                        self._meter.record(instrument, value, label)
            if self._host is not None and not isinstance(event, _ORDINARY):
                self._host.publish()
        except Exception:
            logger.exception('an event is missing in the metrics')

    def watch(self, figures: Callable[[], Figures], last_iteration: int) -> None:
        """Record these figures once a second from now on, on the metrics thread."""
        self._meter.record(TARGET, last_iteration)
        self._meter.record(FINISHED, 0)
        self._figures = figures

    def close(self) -> None:
        """Record the figures a last time and stop."""
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        try:
            self._meter.close()
        except Exception:
            logger.exception('the last metrics may be missing')

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._again_and_again())
        except Exception:
            logger.exception('files of metrics may be left')

    async def _again_and_again(self) -> None:
        stopping = False
        while True:
            try:
                await self._show()
            except Exception:
                logger.exception('metrics')
            if stopping:
                break
            with contextlib.suppress(TimeoutError):
                stopping = await asyncio.wait_for(self._stopping.wait(), _PERIOD_S)
        if self._host is not None:
            self._host.close()

    async def _show(self) -> None:
        if self._figures is not None:
            self._look(self._figures())
        if self._host is not None:
            self._host.publish()
            await self._host.answer()

    def _look(self, now: Figures) -> None:
        before, self._before = self._before, now
        for instrument in INSTRUMENTS:
            if instrument.event is not None or instrument.field is None:
                continue
            for label, value in instrument.values(now):
                earlier = getattr(before, instrument.field) if instrument.counts else 0
                self._meter.record(instrument, value - earlier, label)
