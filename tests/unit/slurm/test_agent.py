# SPDX-License-Identifier: Apache-2.0
import socket

import pytest

from moevement_ext.slurm import messages
from moevement_ext.slurm.agent import Agent
from moevement_ext.slurm.devices import Devices
from moevement_ext.slurm.link import Link
from tests.unit.local_cluster.conftest import dies
from tests.unit.slurm.conftest import SlurmJob

pytestmark = pytest.mark.timeout(120)


def test_workers_do_not_outlive_a_supervisor_that_falls_silent(
    job: SlurmJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a rank might run here and on a spare node."""
    monkeypatch.setattr(messages, 'SILENT_S', 2.0)
    with socket.create_server(('127.0.0.1', 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    agent = Agent(
        Link(here, messages.FROM_SUPERVISOR),
        messages.Job(str(job.program), ['x'], None, {}),
        'a',
        Devices(None),
    )
    supervisor = Link(there, messages.FROM_AGENT)
    supervisor.send(messages.Start(7, 3, {'RANK': '3', 'TORCHELASTIC_RESTART_COUNT': '0'}))
    agent.run()
    started = supervisor.receive()
    assert isinstance(started, messages.Started)
    assert (started.key, started.was_spare) == (7, False)
    assert dies(started.pid)
    assert isinstance(supervisor.receive(), messages.Alive)
