# SPDX-License-Identifier: Apache-2.0
"""Metrics of one rank in OpenTelemetry, whose readers export to Prometheus and over OTLP.

For OTLP the library reads endpoint, headers, interval and resource from the environment
(`OTEL_EXPORTER_OTLP_ENDPOINT`...).
"""

import os
from typing import Any

from moevement_ext.config import ConfigurationError
from moevement_ext.job.metrics.instruments import INSTRUMENTS, Instrument

_ENDPOINTS = ('OTEL_EXPORTER_OTLP_METRICS_ENDPOINT', 'OTEL_EXPORTER_OTLP_ENDPOINT')
_PROTOCOLS = ('OTEL_EXPORTER_OTLP_METRICS_PROTOCOL', 'OTEL_EXPORTER_OTLP_PROTOCOL')
_HTTP = 'http/protobuf'


class Meter:
    """Metrics of one rank, each with `labels`. Any thread."""

    def __init__(self, labels: dict[str, Any], readers: list[Any]) -> None:
        from opentelemetry.sdk.metrics import MeterProvider

        self._labels = labels
        self._provider = MeterProvider(readers)
        meter = self._provider.get_meter('moevement')
        self._record: dict[Instrument, Any] = {
            one: meter.create_counter(one.name, description=one.help).add
            if one.counts
            else meter.create_gauge(one.name, description=one.help).set
            for one in INSTRUMENTS
        }

    def record(self, instrument: Instrument, value: float, label: str | None = None) -> None:
        """Add the value to a counter; set a gauge to it."""
        labels = {} if instrument.label is None else {instrument.label: label}
        self._record[instrument](value, self._labels | labels)

    def close(self) -> None:
        """Send the last values; do not record values afterwards."""
        self._provider.shutdown()


def is_disabled() -> bool:
    """True if the environment disables the library, which then drops all values."""
    return os.environ.get('OTEL_SDK_DISABLED', '').strip().lower() == 'true'


def otlp_is_wanted() -> bool:
    exporter = os.environ.get('OTEL_METRICS_EXPORTER', 'otlp')
    named = any(os.environ.get(name) for name in _ENDPOINTS)
    return named and not is_disabled() and exporter == 'otlp'


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
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f'{_ENDPOINTS[1]} is set, but OpenTelemetry is not installed: pip install '
            'opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, or unset the variable '
            'for this job.'
        ) from error
    return PeriodicExportingMetricReader(OTLPMetricExporter())
