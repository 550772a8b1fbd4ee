# SPDX-License-Identifier: Apache-2.0
"""Real processes behind a real port; some are killed."""

import os
import re
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import parser
from prometheus_client.parser import text_string_to_metric_families

from moevement_ext.config import ConfigurationError, SparseCheckpointConfig
from moevement_ext.events import DeviceProblem, EventLog, FailureDetected
from moevement_ext.job.metrics import observer as metrics
from moevement_ext.job.metrics.host import Host
from moevement_ext.job.metrics.instruments import INSTRUMENTS
from moevement_ext.job.metrics.meter import Meter
from moevement_ext.job.metrics.observer import Observer, observe
from moevement_ext.membership.exchange import Exchange
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.system.forks import isolate_children
from tests.distributed.harness.ports import free_port
from tests.unit.forks import context

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]


def _rank(commands: Connection, port: int, root: Path, rank: int, log: Path | None) -> None:
    """Body of a rank: record what it is told, until the other end is closed."""
    if log is not None:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    isolate_children()
    host = Host(port, root, 'run')
    meter = Meter({'run': 'run', 'node': f'node{rank}', 'rank': rank}, [host.reader])
    observer = Observer(meter, host)
    instruments = {one.name.removeprefix('moevement_'): one for one in INSTRUMENTS}
    commands.send('made')
    with suppress(EOFError):
        while True:
            name, value, *label = commands.recv().split()
            if name != 'fork':
                instrument = instruments[name]
                meter.record(instrument, float(value), *label)
                host.publish()
            elif os.fork() == 0:
                time.sleep(600)
                os._exit(0)
            commands.send('done')
    observer.close()


class Process:
    """A process of a rank that records given values."""

    def __init__(self, port: int, root: Path, rank: int, log: Path | None = None) -> None:
        self._commands, other = context().Pipe()
        self.process = context().Process(target=_rank, args=(other, port, root, rank, log))
        self.process.start()
        other.close()
        assert self._commands.recv() == 'made'

    def record(self, text: str) -> None:
        self._commands.send(text)
        assert self._commands.recv() == 'done'

    def end(self) -> None:
        self._commands.close()
        self.process.join()
        assert self.process.exitcode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(port: int, tmp_path: Path) -> Iterator[Callable[[int], Process]]:
    started: list[Process] = []

    def one(rank: int) -> Process:
        started.append(Process(port, tmp_path / 'root', rank))
        return started[-1]

    yield one
    for process in started:
        process.process.kill()


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Nonzero values by name, rank and further labels; retries until the port answers."""
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f'http://127.0.0.1:{port}/metrics', timeout=10) as answer:
                text = answer.read().decode()
        except OSError:  # no process listens yet, or it is too slow
            assert time.monotonic() < deadline, 'no process answers'
            time.sleep(0.05)
            continue
        return {
            (sample.name, sample.labels['rank'], *_further(sample.labels)): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.value != 0
        }


def _further(labels: dict[str, str]) -> list[str]:
    assert labels['run'] == 'run' and labels['node'] == f'node{labels["rank"]}'
    return [value for name, value in labels.items() if name not in ('run', 'node', 'rank')]


def test_one_port_serves_all_ranks(start: Callable[[int], Process], port: int) -> None:
    first, second = start(0), start(1)
    first.record('iteration 7')
    second.record('iteration 6')
    second.record('recovery_seconds 1.5 replay')
    second.record('recovery_seconds 0.5 replay')
    assert scrape(port) == {
        ('moevement_iteration', '0'): 7,
        ('moevement_iteration', '1'): 6,
        ('moevement_recovery_seconds_total', '1', 'replay'): 2,
    }


def test_another_process_serves_after_the_server_is_killed(
    start: Callable[[int], Process], port: int
) -> None:
    first = start(0)
    scrape(port)
    second = start(1)
    first.record('iteration 7')
    first.record('iterations 7')
    second.record('iteration 6')
    first.kill()
    assert scrape(port) == {
        ('moevement_iteration', '1'): 6,
        ('moevement_iterations_total', '0'): 7,
    }
    again = start(0)
    again.record('iteration 8')
    again.record('iterations 1')
    found = scrape(port)
    assert found['moevement_iteration', '0'] == 8
    assert found['moevement_iterations_total', '0'] == 8


def test_surviving_children_do_not_keep_the_port(port: int, tmp_path: Path) -> None:
    """For example, data loader workers."""
    log = tmp_path / 'log'
    log.touch()
    with ExitStack() as started:
        first = Process(port, tmp_path / 'root', 0)
        scrape(port)
        second = Process(port, tmp_path / 'root', 1, log)
        started.callback(second.process.kill)
        first.record('fork 0')
        (loader,) = psutil.Process(first.process.pid).children()
        started.callback(loader.kill)
        second.record('iteration 6')
        first.kill()
        assert scrape(port) == {('moevement_iteration', '1'): 6}
        assert loader.is_running()
    assert log.read_text() == ''


def test_port_taken_by_another_program_is_named(port: int, tmp_path: Path) -> None:
    log = tmp_path / 'log'
    log.touch()
    with socket.create_server(('', port)) as other:
        process = Process(port, tmp_path / 'root', 0, log)
        try:
            process.record('iteration 7')
            deadline = time.monotonic() + 120
            while not log.read_text():
                assert time.monotonic() < deadline, 'no warning'
                time.sleep(0.05)
            other.close()
            assert scrape(port) == {('moevement_iteration', '0'): 7}
            process.end()
        finally:
            process.process.kill()
    [line] = log.read_text().splitlines()
    assert f'--sparse-ckpt-metrics {port}: no client can read' in line and 'in use' in line


def test_port_taken_by_another_rank_is_accepted(port: int, tmp_path: Path) -> None:
    log = tmp_path / 'log'
    log.touch()
    ranks = [Process(port, tmp_path / 'root', rank, log) for rank in range(2)]
    scrape(port)
    for process in reversed(ranks):  # each has tried to bind the port by its end
        process.end()
    assert log.read_text() == ''


def test_files_are_removed_when_all_processes_have_ended(
    start: Callable[[int], Process], port: int, tmp_path: Path
) -> None:
    killed, *others = start(0), start(1), start(2)
    for process in (killed, *others):
        process.record('iteration 1')
    killed.kill()
    for process in others:
        process.end()
    assert list((tmp_path / 'root').iterdir()) == []
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(f'http://127.0.0.1:{port}', timeout=1)


def test_page_with_the_last_values_outlives_the_process(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that loses its GPU ends right after its last event."""
    monkeypatch.setattr(metrics, '_PERIOD_S', 1000.0)
    host = Host(port, tmp_path, 'run')
    observer = Observer(Meter({'run': 'run', 'node': 'node0', 'rank': 0}, [host.reader]), host)
    scrape(port)
    [page] = tmp_path.glob('.metrics/run/*.page')
    assert 'moevement_device_problems' not in page.read_text()
    observer.event(DeviceProblem(device='GPU-1', harm='device', what='Xid 79'))
    assert 'moevement_device_problems_total{harm="device"' in page.read_text()
    before = page.read_text()
    observer.close()
    observer.event(FailureDetected(reason='too late'))
    assert list(tmp_path.iterdir()) == []
    page.parent.mkdir(parents=True)
    page.write_text(before)  # as after SIGKILL
    heir = Host(port, tmp_path, 'run')
    text = heir._of_all('')[1].decode()
    assert 'moevement_device_problems_total{harm="device"' in text


def test_page_of_a_dead_process_is_read_once(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of weeks leaves hundreds of them, and the process that serves them trains."""
    read: list[str] = []

    def parse(text: str) -> Iterator[Any]:
        read.append(text)
        return text_string_to_metric_families(text)

    monkeypatch.setattr(parser, 'text_string_to_metric_families', parse)
    host = Host(port, tmp_path, 'run')
    meter = Meter({'run': 'run', 'node': 'node0', 'rank': 0}, [host.reader])
    instruments = {one.name: one for one in INSTRUMENTS}
    meter.record(instruments['moevement_iteration'], 7)
    meter.record(instruments['moevement_iterations'], 2)
    host.publish()
    [own] = tmp_path.glob('.metrics/run/*.page')
    for number in range(3):  # as after SIGKILL
        own.with_name(f'{number}-1.page').write_text(own.read_text().replace(' 7.0', ' 6.0'))
    for _ in range(2):
        text = host._of_all('')[1].decode()
        found = re.findall(r'^moevement_iterations?(?:_total)?{.*} (.*)$', text, re.MULTILINE)
        assert found == ['8.0', '7.0']
    assert len(read) == 5  # the dead once, the living twice


def test_disabled_opentelemetry_is_refused(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('OTEL_SDK_DISABLED', 'True')
    with pytest.raises(ConfigurationError, match='OTEL_SDK_DISABLED=true switches off'):
        Host(port, tmp_path, 'run')


def test_every_metric_is_documented_under_its_prometheus_name() -> None:
    page = (Path(__file__).parents[4] / 'docs' / 'metrics.md').read_text()
    rows = re.findall(r'^\| `(moevement_\w+)` \| (?:`(\w+)`)? ?\| (.*) \|$', page, re.MULTILINE)
    assert rows == [
        (one.name + ('_total' if one.counts else ''), one.label or '', one.help)
        for one in INSTRUMENTS
    ]


def test_metric_names_are_unique_and_without_suffix() -> None:
    """The library adds the suffix of counters."""
    assert len({one.name for one in INSTRUMENTS}) == len(INSTRUMENTS) == 30
    assert not any(one.name.endswith('_total') for one in INSTRUMENTS)


def test_replacement_continues_without_the_library(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start of a job is refused; during a job, the other ranks wait for this process."""
    monkeypatch.setitem(sys.modules, 'opentelemetry.exporter.prometheus', None)
    config = SparseCheckpointConfig(dir=str(tmp_path), metrics=port)
    for joining in (False, True):
        exchange = Exchange(None, joining)
        identity, events = RankIdentity('run', 'pp1', 0), EventLog(None, 0)
        rank = Rank(identity, 1, 'run', 'gloo', config, events, exchange)
        if joining:
            assert observe(rank) is None
        else:
            with pytest.raises(ConfigurationError, match='opentelemetry-exporter-prometheus'):
                observe(rank)


def test_clients_use_no_threads_and_bounded_descriptors(
    start: Callable[[int], Process], port: int
) -> None:
    """Prometheus gets its answer despite many silent or slow clients."""
    rank = start(0)
    rank.record('iteration 7')
    expected = scrape(port)
    before = _held(rank.process.pid)
    with ExitStack() as strangers:
        for number in range(100):
            one = socket.create_connection(('127.0.0.1', port), timeout=30)
            strangers.callback(one.close)
            with suppress(OSError):  # the server has already closed it
                one.sendall(b'GET / HTTP/1.1\r\n' if number % 2 else b'')
        assert scrape(port) == expected
        threads, descriptors = _held(rank.process.pid)
        assert threads == before[0] and descriptors <= before[1] + 20


def test_endless_request_is_cut_off(start: Callable[[int], Process], port: int) -> None:
    start(0)
    scrape(port)
    with socket.create_connection(('127.0.0.1', port), timeout=60) as endless:
        with pytest.raises(OSError):
            for _ in range(10_000):  # 10 MB, more than the buffers of both sockets hold
                endless.sendall(b'x' * 1000)


def test_only_get_requests_are_answered(start: Callable[[int], Process], port: int) -> None:
    start(0).record('iteration 7')
    scrape(port)
    address = f'http://127.0.0.1:{port}/metrics'
    with pytest.raises(urllib.error.HTTPError, match='405'):
        urllib.request.urlopen(address, data=b'anything', timeout=30)
    openmetrics = urllib.request.Request(
        address, headers={'Accept': 'application/openmetrics-text'}
    )
    with urllib.request.urlopen(openmetrics, timeout=30) as answer:
        assert answer.headers['Content-Type'].startswith('application/openmetrics-text')
        assert answer.read().endswith(b'# EOF\n')


def _held(pid: int) -> tuple[int, int]:
    process = psutil.Process(pid)
    return process.num_threads(), process.num_fds()
