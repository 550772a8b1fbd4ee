# SPDX-License-Identifier: Apache-2.0
"""Real processes behind real ports; some are killed."""

import os
import re
import signal
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moevement_ext.config import ConfigurationError, SparseCheckpointConfig
from moevement_ext.events import EventLog, NextTier, Recovered, WindowCommitted
from moevement_ext.job.metrics import INSTRUMENTS, Observer, observe
from moevement_ext.membership.exchange import Exchange
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.protect.statistics import Figures
from moevement_ext.system.process_setup import isolate_children
from tests.distributed.harness.ports import free_port
from tests.support.forks import context

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]

COMMITTED = WindowCommitted(
    start=0, plan='a', slots=[], training_s=0.0, exposed_s=0.0, copy_bytes_per_s=None,
    send_bytes_per_s=None, helpers_s=0.0,
)  # fmt: skip


def observed(port: int, number: int = 0, joining: bool = False) -> Observer | None:
    identity, events = RankIdentity('run', 'pp1', number), EventLog(None, number)
    config = SparseCheckpointConfig(metrics=port)
    return observe(Rank(identity, 1, 'run', 'gloo', config, events, Exchange(None, joining)))


def _rank(commands: Connection, port: int, local_rank: int, log: Path) -> None:
    """Body of a rank: do what it is told, until the other end is closed."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    isolate_children()
    os.environ |= {'LOCAL_RANK': str(local_rank), 'MOEVEMENT_NODE': f'node{local_rank}'}
    observer = observed(port, local_rank)
    assert observer is not None
    commands.send('made')
    with suppress(EOFError):
        while True:
            match commands.recv():
                case int(iterations):
                    figures = Figures(iteration=iterations, iterations=iterations)
                    observer.watch(lambda figures=figures: figures, 500)
                case 'fork':
                    if os.fork() == 0:
                        signal.pause()
                case event:
                    observer.event(event)
            commands.send('done')
    observer.close()


class Process:
    """A process of a rank that records given values."""

    def __init__(self, port: int, local_rank: int, log: Path) -> None:
        self._commands, other = context().Pipe()
        self.process = context().Process(target=_rank, args=(other, port, local_rank, log))
        self.process.start()
        other.close()
        assert self._commands.recv() == 'made'

    def tell(self, what: object) -> None:
        self._commands.send(what)
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
def log(tmp_path: Path) -> Path:
    path = tmp_path / 'log'
    path.touch()
    return path


@pytest.fixture
def start(port: int, log: Path) -> Iterator[Callable[[int], Process]]:
    started: list[Process] = []

    def one(local_rank: int) -> Process:
        started.append(Process(port, local_rank, log))
        return started[-1]

    yield one
    for process in started:
        process.process.kill()


def scrape(port: int) -> dict[str, float]:
    """Nonzero values by name and labels other than the run."""
    with urllib.request.urlopen(f'http://127.0.0.1:{port}/metrics', timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {}
    for sample in [sample for family in families for sample in family.samples if sample.value]:
        if sample.labels.pop('version', None) is not None:
            assert (sample.name, sample.value) == ('moevement_build_info', 1)
            continue
        assert sample.labels.pop('run') == 'run'
        place = sample.labels.pop('node'), sample.labels.pop('rank')
        found[
            ' '.join([sample.name.removeprefix('moevement_'), *place, *sample.labels.values()])
        ] = sample.value
    return found


def test_each_rank_serves_its_port(start: Callable[[int], Process], port: int) -> None:
    ranks = start(0), start(1)
    for number, rank in enumerate(ranks):
        rank.tell(7 + number)
    ranks[1].tell(NextTier(reason='', tier='disk'))
    for number, further in enumerate(({}, {'next_tier_total node1 1 disk': 1})):
        assert scrape(port + number) == {
            f'iteration node{number} {number}': 7 + number,
            f'iterations_total node{number} {number}': 7 + number,
            f'train_iterations node{number} {number}': 500,
            **further,
        }
    for rank in ranks:
        rank.end()
    with pytest.raises(OSError):
        scrape(port)


def test_restarted_rank_has_its_port_and_series_again(
    start: Callable[[int], Process], port: int, log: Path
) -> None:
    """Although a child of its predecessor lives, such as a data loader, and a scraper waits."""
    first = start(0)
    first.tell(7)
    before = scrape(port)
    with ExitStack() as left, socket.create_connection(('127.0.0.1', port), timeout=60) as scraper:
        scraper.sendall(b'GET / HTTP/1.1\r\n')
        first.tell('fork')
        (loader,) = psutil.Process(first.process.pid).children()
        left.callback(loader.kill)
        first.kill()
        again = start(0)
        again.tell(2)
        assert scrape(port) == {name: 500 if value == 500 else 2 for name, value in before.items()}
        assert loader.is_running()
    assert log.read_text() == ''


@pytest.mark.parametrize('taken_by', ['a program', 'no one: it is no port'])
def test_missing_port_is_named_once_and_tried_again(
    taken_by: str, start: Callable[[int], Process], port: int, log: Path
) -> None:
    if taken_by != 'a program':
        rank = Process(65535, 1, log)
        try:
            rank.tell(COMMITTED)
            rank.end()
        finally:
            rank.process.kill()
    else:
        with socket.create_server(('', port)):
            rank = start(0)
            rank.tell(7)
            rank.tell(COMMITTED)
        rank.tell(COMMITTED)
        assert scrape(port)['iteration node0 0'] == 7
        rank.end()
    [line] = log.read_text().splitlines()
    assert '--sparse-ckpt-metrics: Prometheus cannot read this rank' in line


def test_disabled_opentelemetry_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('OTEL_SDK_DISABLED', 'True')
    with pytest.raises(ConfigurationError, match='OTEL_SDK_DISABLED=true switches off'):
        observed(port)


def test_names_are_those_of_the_table(port: int) -> None:
    """Prometheus sees them as they are, although OpenTelemetry has them apart from their units."""
    observer = observed(port)
    assert observer is not None
    done = {'seconds': {'find': 1.5, 'replay': 2.0}, 'replayed': 2, 'verified': 3}
    observer.event(Recovered(**done, verified_at=9, differing=[], iterations=1))
    figures = Figures(1, 1, 1, 1, copy_bytes_per_s=1.0, disk_bytes=1, ended_at=5.0)
    figures.host_memory, figures.waits_s = {'windows': 1}, {'1': 1.0}
    figures.durations.extend([0.3, 0.4, 30.0])
    observer.watch(lambda: figures, 500)
    observer.event(COMMITTED)
    with urllib.request.urlopen(f'http://127.0.0.1:{port}/metrics', timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    observer.close()
    found = {sample.name: sample for family in families for sample in family.samples}
    unset = {one.name for one in INSTRUMENTS if one.event and (one.kind == 'gauge' or one.label)}
    set_by_event = {'moevement_recoveries', 'moevement_recovery_seconds'}
    expected = {one.name for one in INSTRUMENTS} - unset | set_by_event | {'moevement_finished'}
    ends = r'_total$|_bucket$|_sum$|_count$'
    assert {re.sub(ends, '', name) for name in found} == expected
    assert found['moevement_last_iteration_timestamp_seconds'].value == 5
    assert found['moevement_recovery_duration_seconds_sum'].value == 3.5
    below = [sample.value for family in families for sample in family.samples
             if sample.name == 'moevement_iteration_duration_seconds_bucket']  # fmt: skip
    assert below[:3] == [0, 0, 2] and below[-1] == 3 and not figures.durations


def test_every_metric_is_documented_under_its_prometheus_name() -> None:
    page = (Path(__file__).parents[4] / 'docs' / 'metrics.md').read_text()
    rows = re.findall(r'^\| `(moevement_\w+)` \| (?:`(\w+)`)? ?\| (.*) \|$', page, re.MULTILINE)
    assert rows == [
        (one.name + ('_total' if one.kind == 'counter' else ''), one.label or '', one.help)
        for one in INSTRUMENTS
    ]


def test_replacement_continues_without_the_library(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start of a job is refused; during a job, the other ranks wait for this process."""
    monkeypatch.setitem(sys.modules, 'opentelemetry.exporter.prometheus', None)
    assert observed(port, joining=True) is None
    with pytest.raises(ConfigurationError, match='opentelemetry-exporter-prometheus'):
        observed(port)
