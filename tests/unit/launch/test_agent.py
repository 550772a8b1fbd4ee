# SPDX-License-Identifier: Apache-2.0

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from moevement_ext.errors import EXIT_USER_ERROR, EXIT_WHOLE_JOB
from moevement_ext.events import Event
from moevement_ext.launch import link, messages
from moevement_ext.launch.agent import Agent, Devices
from moevement_ext.launch.hosts import SlurmStarter
from moevement_ext.launch.launch_config import LaunchConfig
from moevement_ext.launch.launcher_events import (
    DevicesFailing,
    NodeLost,
    NodeReady,
    WorkerLaunched,
)
from moevement_ext.launch.node import Node
from tests.support.readable import dies
from tests.unit.launch.conftest import failure
from tests.unit.launch.on_hosts import SlurmJob, connected

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]
JOB = SlurmJob

VARIABLES = {
    'RANK': '3',
    'TORCHELASTIC_RESTART_COUNT': '0',
    'MASTER_ADDR': '127.0.0.1',
    'MASTER_PORT': '1',  # no process listens there
}


def test_workers_end_when_the_supervisor_falls_silent(
    job: SlurmJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a rank could run on this node and on a spare node."""
    monkeypatch.setattr(messages, 'SILENT_S', 2.0)
    here, supervisor = connected()
    program = messages.Program('/', str(job.program), ['x'], None, {})
    agent = Agent(here, program, 'a', Devices(None), bytes(32))
    supervisor.send(messages.StartWorker(7, 3, VARIABLES, watched=False))
    agent.run()
    started = supervisor.receive()
    assert isinstance(started, messages.Started)
    assert (started.key, started.was_spare) == (7, False)
    assert dies(started.pid)
    assert isinstance(supervisor.receive(), messages.Alive)


def test_busy_agent_sends_heartbeats_and_survives(
    job: SlurmJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, 'SILENT_S', 5.0)
    monkeypatch.setattr(link, '_HEARTBEAT_S', 0.1)
    here, supervisor = connected()
    program = messages.Program('/', str(job.program), ['3.0=exit:0'], str(tmp_path), {})
    agent = Agent(here, program, 'a', Devices(None), bytes(32))
    log, alias = tmp_path / 'rank3.log', tmp_path / 'alias'
    os.mkfifo(log)  # open() blocks until there is a reader
    os.link(log, alias)
    supervisor.send(messages.StartWorker(7, 3, VARIABLES, watched=False))
    running = threading.Thread(target=agent.run, daemon=True)
    running.start()
    for _ in range(8):
        assert isinstance(supervisor.receive(), messages.Alive)
        supervisor.heartbeat()
    log.unlink()
    reader = os.open(alias, os.O_RDONLY | os.O_NONBLOCK)
    heard = [supervisor.receive()]
    while not isinstance(heard[-1], messages.Ended):
        supervisor.heartbeat()
        heard.append(supervisor.receive())
    assert heard[-1].code == 0
    assert any(isinstance(message, messages.Started) for message in heard)
    supervisor.close()
    running.join()
    os.close(reader)


@pytest.fixture
def in_an_image(job: SlurmJob, monkeypatch: pytest.MonkeyPatch) -> SlurmJob:
    """Agents start in another directory than the launcher, which got a relative path."""
    monkeypatch.chdir(job.folder)
    monkeypatch.setenv('PWD', str(job.folder))
    job.program = Path(job.program.name)
    job.wrapper = ['env', '--chdir=/']
    return job


def test_relative_paths_are_those_of_the_launcher(in_an_image: SlurmJob) -> None:
    in_an_image.finish_when = lambda: len(in_an_image.started(0)) == 1
    assert in_an_image.on_hosts('a', '0.0=print:x', nodes=1, log_dir=Path('logs')).run() == 0
    assert (in_an_image.folder / 'logs' / 'rank0.log').read_text().endswith('x\n')


def test_missing_program_on_a_node_is_a_user_error(
    in_an_image: SlurmJob, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a job with --requeue would go on and on without its healthy nodes."""
    monkeypatch.setattr(messages, '_directory', lambda: Path('/not/mounted'))
    in_an_image.finish_when = lambda: False
    assert in_an_image.on_hosts('ab', nodes=1).run() == EXIT_USER_ERROR
    assert "can't open file" in failure(in_an_image)
    assert "'/not/mounted': relative paths are not found" in capfd.readouterr().err


def test_directory_has_the_name_by_which_the_user_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image may have a link's path, and not the path that it leads to."""
    (tmp_path / 'lustre').mkdir()
    (tmp_path / 'home').symlink_to('lustre')
    config = LaunchConfig('program.py', log_dir=Path('logs'))
    monkeypatch.chdir(tmp_path / 'home')
    monkeypatch.setenv('PWD', str(tmp_path / 'home'))
    sent = messages.program(config, {})
    assert (sent.directory, sent.log_dir) == (f'{tmp_path}/home', f'{tmp_path}/home/logs')
    monkeypatch.setenv('PWD', '/')  # of another shell
    assert messages.program(config, {}).directory == f'{tmp_path.resolve()}/lustre'


class Arrivals:
    """A supervisor with the host `a` only; its agents arrive one by one."""

    def __init__(self) -> None:
        self.reported: list[Event] = []
        loop, config = MagicMock(), MagicMock(nodes=1)
        self.starter: Any = SlurmStarter(['a'], MagicMock(), config, loop, self.reported.append)

    def arrive(self, host: str) -> MagicMock:
        link = MagicMock()
        arrived = [(messages.Here(host), link)]
        self.starter._listener = SimpleNamespace(take=lambda: arrived)
        self.starter._arrivals()
        return link


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arrivals]:
    monkeypatch.setattr(messages, 'program', lambda *given: 'the program')
    monkeypatch.setattr('moevement_ext.launch.hosts.default_variables', lambda config: {})
    yield Arrivals()


def test_new_agent_of_a_host_ends_the_earlier_one(arrivals: Arrivals) -> None:
    """Else workers of the earlier agent would live on beside the new ones."""
    before, after = arrivals.arrive('a'), arrivals.arrive('a')
    before.close.assert_called_once()
    after.close.assert_not_called()
    assert [type(event) for event in arrivals.reported] == [NodeReady, NodeLost, NodeReady]


def test_agent_of_an_unknown_host_is_turned_away(arrivals: Arrivals) -> None:
    stranger = arrivals.arrive('b')
    stranger.close.assert_called_once()
    stranger.send.assert_not_called()
    assert arrivals.reported == []


@pytest.mark.parametrize(('minutes', 'missed'), [(10, 0), (16, 1)])
def test_agent_may_come_after_the_import_of_a_large_image(minutes: int, missed: int) -> None:
    """Reports name up to seven minutes for 20 GB; cancelled, the import would begin anew."""
    on_missed, step = MagicMock(), MagicMock(since=time.monotonic() - 60 * minutes)
    step.ended.return_value = None
    node = Node('a', MagicMock(), MagicMock(), MagicMock(), on_missed)
    node.begin(step)
    node.poll()
    assert (on_missed.call_count, step.cancel.call_count) == (missed, missed)
    assert not missed or 'within 15 minutes' in node.why


def failing(job: SlurmJob) -> list[tuple[str, str]]:
    return [(event.host, event.trouble) for event in job.seen(DevicesFailing)]


def test_spare_host_replaces_a_host_with_a_lost_device(job: SlurmJob) -> None:
    """The worker there hangs, as in a collective, and the launcher does not wait for it."""
    devices = job.devices('b')

    job.on(WorkerLaunched, lambda event: devices.set('GPU-0', lost=True), rank=1, restarts=0)
    job.finish_when = lambda: len(job.started(1)) == 2
    assert job.on_hosts('abc', nodes=2).run() == 0
    assert job.seated() == [('a', 0), ('b', 1), ('c', 1)]
    assert failing(job) == [('b', 'GPU GPU-0: the driver does not reach it')]
    assert dies(job.started(1)[0].pid)
    assert job.attempt(1, 1)['env']['MOEVEMENT_NODE'] == 'c'
    assert len(job.steps['b']) == 1  # the host is not tried again


def test_host_with_a_lost_device_gets_no_rank(job: SlurmJob) -> None:
    job.devices('a').set('GPU-0', action=1)
    job.finish_when = lambda: len(job.started()) == 2
    assert job.on_hosts('abc', nodes=2).run() == 0
    assert job.seated() == [('b', 0), ('c', 1)]
    trouble = 'GPU GPU-0: the driver asks for a reset of the GPU'
    assert failing(job) == [('a', trouble)]


def test_job_without_a_usable_host_ends(job: SlurmJob) -> None:
    job.devices('b').set('GPU-0', lost=True)
    assert job.on_hosts('ab', nodes=2).run() == EXIT_WHOLE_JOB
    assert '(b: GPU GPU-0: the driver does not reach it)' in failure(job)
