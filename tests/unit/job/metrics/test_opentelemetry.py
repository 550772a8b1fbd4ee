# SPDX-License-Identifier: Apache-2.0
"""Values reach a real endpoint over OTLP."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.events import EventLog
from moevement_ext.job.metrics import observe, otlp_is_wanted
from moevement_ext.membership.exchange import Exchange
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.window.name import RankIdentity

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]

RANK = """
import os
from moevement_ext.events import Recovered
from moevement_ext.job.metrics import Observer, otlp, otlp_is_wanted

def count(seconds):
    done = {'replayed': 2, 'verified': 3, 'verified_at': 9, 'differing': [], 'iterations': 1}
    observer.event(Recovered(**done, seconds={'replay': seconds}))

assert otlp_is_wanted()
observer = Observer({'run': 'run', 'node': 'node0', 'rank': 3}, [otlp()])
count(1.5)
count(0.5)
child = os.fork()
if child == 0:  # such as a data loader
    count(100.0)
observer.close()
if child != 0:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[bytes]]]:
    """Address of a collector and the requests that it has received."""
    requests: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(self.rfile.read(int(self.headers['Content-Length'])))
            self.send_response(200)
            self.end_headers()

    server = HTTPServer(('127.0.0.1', 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f'http://127.0.0.1:{server.server_port}', requests
    server.shutdown()
    server.server_close()
    thread.join()


def test_collector_receives_the_values_of_a_rank_and_not_of_its_forks(
    endpoint: tuple[str, list[bytes]],
) -> None:
    """A fork has the counts of its parent, and a thread that sends."""
    address, requests = endpoint
    own = {'OTEL_SERVICE_NAME': 'named', 'OTEL_RESOURCE_ATTRIBUTES': 'team=a,service.instance.id=b'}
    environment = {**os.environ, 'OTEL_EXPORTER_OTLP_ENDPOINT': address, **own}
    subprocess.run([sys.executable, '-c', RANK], env=environment, check=True)
    [request] = requests
    [sent] = ExportMetricsServiceRequest.FromString(request).resource_metrics
    resource = {one.key: one.value.string_value for one in sent.resource.attributes}
    assert resource['service.instance.id'] == 'run/3', 'of the rank, not of the process'
    assert (resource['service.name'], resource['host.name']) == ('named', socket.gethostname())
    assert resource['team'] == 'a'
    found = {}
    for metric in sent.scope_metrics[0].metrics:
        for point in (*metric.gauge.data_points, *metric.sum.data_points):
            attributes = {one.key: one.value for one in point.attributes}
            assert attributes['rank'].int_value == 3
            assert attributes['run'].string_value == 'run'
            found[metric.name, metric.unit] = point.as_double or point.as_int
    assert found['moevement.recovery', 's'] == 2.0
    assert found['moevement.verified_operators', ''] == 6


FINISHED = """
from moevement_ext.events import Finished
from moevement_ext.job.metrics import Observer, otlp
from moevement_ext.protect.statistics import Figures
from moevement_ext.system import leaving

def finish(code):
    observer.event(Finished(removed=True))
    observer.close()

observer = Observer({'run': 'run', 'node': 'node0', 'rank': 3}, [otlp()])
observer.watch(Figures, 9)
leaving.leave_in_any_case()
leaving.last_acts.append(finish)
"""


def test_collector_hears_of_the_end(endpoint: tuple[str, list[bytes]]) -> None:
    """A job finishes after Python's functions at exit, of which the library has one."""
    environment = {**os.environ, 'OTEL_EXPORTER_OTLP_ENDPOINT': endpoint[0]}
    subprocess.run([sys.executable, '-c', FINISHED], env=environment, check=True)
    [sent] = ExportMetricsServiceRequest.FromString(endpoint[1][-1]).resource_metrics
    [finished] = [one for one in sent.scope_metrics[0].metrics if one.name.endswith('finished')]
    assert finished.gauge.data_points[0].as_int == 1


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith('OTEL_')]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ('variables', 'said'),
    [
        ({'OTEL_EXPORTER_OTLP_PROTOCOL': 'grpc'}, 'OTEL_EXPORTER_OTLP_PROTOCOL=grpc: metrics go'),
        ({'OTEL_EXPORTER_OTLP_METRICS_PROTOCOL': 'http/json'},
         'OTEL_EXPORTER_OTLP_METRICS_PROTOCOL=http/json: metrics go'),
        ({'OTEL_EXPORTER_OTLP_PROTOCOL': 'http/protobuf'}, None),
        ({'OTEL_EXPORTER_OTLP_METRICS_PROTOCOL': 'http/protobuf',
          'OTEL_EXPORTER_OTLP_PROTOCOL': 'grpc'}, None),
    ],
)  # fmt: skip
def test_unsupported_protocol_is_named(
    variables: dict[str, str],
    said: str | None,
    endpoint: tuple[str, list[bytes]],
    environment: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Metrics are lost, but training continues."""
    for name, value in {'OTEL_EXPORTER_OTLP_ENDPOINT': endpoint[0], **variables}.items():
        environment.setenv(name, value)
    identity, config = RankIdentity('run', 'pp1', 0), SparseCheckpointConfig()
    rank = Rank(identity, 1, 'run', 'gloo', config, EventLog(None, 0), Exchange(None, False))
    observer = observe(rank)
    if observer is not None:
        observer.close()
    assert (observer is None) == (said is not None)
    assert said is None or said in caplog.text


@pytest.mark.parametrize(
    ('variables', 'wanted'),
    [
        ({}, False),
        ({'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://collector:4318'}, True),
        ({'OTEL_EXPORTER_OTLP_METRICS_ENDPOINT': 'http://collector:4318/v1/metrics'}, True),
        ({'OTEL_EXPORTER_OTLP_TRACES_ENDPOINT': 'http://collector:4318/v1/traces'}, False),
        ({'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://c', 'OTEL_METRICS_EXPORTER': 'none'}, False),
        ({'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://c', 'OTEL_SDK_DISABLED': 'true'}, False),
    ],
)
def test_otlp_is_enabled_by_the_environment(
    variables: dict[str, str], wanted: bool, environment: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    assert otlp_is_wanted() == wanted
