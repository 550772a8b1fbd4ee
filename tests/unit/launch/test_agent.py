# SPDX-License-Identifier: Apache-2.0

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from moevement_ext.errors import EXIT_USER_ERROR
from moevement_ext.events import Event
from moevement_ext.launch import messages
from moevement_ext.launch.agent import Agent, Devices
from moevement_ext.launch.hosts import SlurmStarter
from moevement_ext.launch.launcher_events import DevicesFailing, NodeLost, NodeReady, WorkerLaunched
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
    monkeypatch.setattr(agent._machine, 'report_kills', looks := MagicMock())
    supervisor.send(messages.StartWorker(7, 3, VARIABLES, watched=False))
    agent.run()
    assert looks.called
    started = supervisor.receive()
    assert isinstance(started, messages.Started)
    assert (started.key, started.was_spare) == (7, False)
    assert dies(started.pid)
    assert isinstance(supervisor.receive(), messages.Alive)


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
