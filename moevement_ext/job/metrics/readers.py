# SPDX-License-Identifier: Apache-2.0
"""Readers of OpenTelemetry: Prometheus scrapes a port of each process, OTLP goes to a collector.

For OTLP the library reads endpoint, headers, interval and resource from the environment
(`OTEL_EXPORTER_OTLP_ENDPOINT`...).
"""

import os
import socket
from typing import Any

from moevement_ext.config import ConfigurationError
from moevement_ext.logger import logger_of

logger = logger_of(__name__)

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
