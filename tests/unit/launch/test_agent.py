# SPDX-License-Identifier: Apache-2.0
import os
import threading
from pathlib import Path

import pytest

from moevement_ext.errors import EXIT_USER_ERROR
from moevement_ext.launch import link, messages
from moevement_ext.launch.agent import Agent, Devices
from moevement_ext.launch.launch_config import LaunchConfig
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
    program = messages.Program('/', str(job.program), ['x'], None, {}, fork=False)
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
    """For example, while it waits for a file system. It then carries out the pending orders."""
    monkeypatch.setattr(messages, 'SILENT_S', 5.0)
    monkeypatch.setattr(link, '_HEARTBEAT_S', 0.1)
    here, supervisor = connected()
    program = messages.Program('/', str(job.program), ['3.0=exit:0'], str(tmp_path), {}, fork=False)
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
