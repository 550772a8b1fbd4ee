# SPDX-License-Identifier: Apache-2.0
"""Values over OTLP, to where the variables of OpenTelemetry say (`OTEL_EXPORTER_OTLP_ENDPOINT`...).

The library reads the endpoint, headers, the interval and the resource from the environment.
"""

import os
from typing import Any

from moevement_ext.config import ConfigurationError
from moevement_ext.metrics.instruments import INSTRUMENTS, Instrument, Kind

_ENDPOINTS = ('OTEL_EXPORTER_OTLP_METRICS_ENDPOINT', 'OTEL_EXPORTER_OTLP_ENDPOINT')
_PROTOCOLS = ('OTEL_EXPORTER_OTLP_METRICS_PROTOCOL', 'OTEL_EXPORTER_OTLP_PROTOCOL')
_HTTP = 'http/protobuf'


def wanted() -> bool:
    """Whether the environment names an endpoint for metrics, and OpenTelemetry is not disabled."""
    disabled = os.environ.get('OTEL_SDK_DISABLED', '').lower() == 'true'
    exporter = os.environ.get('OTEL_METRICS_EXPORTER', 'otlp')
    named = any(os.environ.get(name) for name in _ENDPOINTS)
    return named and not disabled and exporter == 'otlp'


class OpenTelemetryRecorder:
    """Values of one rank; the library sends them on a thread of its own.

    Args:
        run_id: name of the run.
        node: name of this node, real or emulated.
        rank: global rank.

    Raises:
        ConfigurationError: the library is missing, or the environment asks for another protocol
            than HTTP.
    """

    def __init__(self, run_id: str, node: str, rank: int) -> None:
        _check_protocol()
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f'{_ENDPOINTS[1]} is set, but OpenTelemetry is not installed: pip install '
                'opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, or unset the variable '
                'for this job.'
            ) from error
        self._common = {'run': run_id, 'node': node, 'rank': rank}
        self._provider = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())])
        meter = self._provider.get_meter('moevement')
        make: dict[Kind, Any] = {Kind.COUNTER: meter.create_counter, Kind.GAUGE: meter.create_gauge}
        self._metrics = {one: make[one.kind](one.name, description=one.help) for one in INSTRUMENTS}

    def add(self, instrument: Instrument, amount: float, label: str | None = None) -> None:
        """Add to a counter."""
        self._metrics[instrument].add(amount, self._attributes(instrument, label))

    def set(self, instrument: Instrument, value: float, label: str | None = None) -> None:
        """Replace the value of a gauge."""
        self._metrics[instrument].set(value, self._attributes(instrument, label))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _attributes(self, instrument: Instrument, label: str | None) -> dict[str, Any]:
        return (
            self._common if instrument.label is None else {**self._common, instrument.label: label}
        )


def _check_protocol() -> None:
    """The exporter speaks HTTP and does not look at these variables."""
    name = next((name for name in _PROTOCOLS if os.environ.get(name)), None)
    if name is not None and os.environ[name] != _HTTP:
        raise ConfigurationError(
            f'{name}={os.environ[name]}: metrics go over {_HTTP} only. Set {_PROTOCOLS[0]}={_HTTP} '
            f'and {_ENDPOINTS[0]} to where the collector takes HTTP, as '
            'http://HOST:4318/v1/metrics.'
        )
