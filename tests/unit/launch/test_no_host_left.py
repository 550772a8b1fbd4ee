# SPDX-License-Identifier: Apache-2.0
"""No host is left for a seat, under the launcher for Slurm on its fictitious hosts."""

import pytest

from moevement_ext.launch import guests, hosts, node
from moevement_ext.launch.launch_config import WAIT
from moevement_ext.launch.launcher_events import NodeAwaited, WorkerLaunched
from moevement_ext.membership.counters import open_barrier, read_heartbeats, sign
from tests.unit.launch.conftest import ended
from tests.unit.launch.on_hosts import SlurmJob

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]
JOB = SlurmJob


@pytest.fixture(autouse=True)
def hosts_are_tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, '_FIRST_PAUSE_S', 1.0)
    monkeypatch.setattr(hosts, '_TRY_AGAIN_S', 1.0)
    monkeypatch.setattr(guests, '_SAY_AGAIN_S', 1.0)


def test_job_waits_for_a_lost_host(job: SlurmJob) -> None:
    """The launcher sends the heartbeats of its rank, for which the other ranks wait."""
    beats: list[int] = []

    def note(event: NodeAwaited) -> None:
        beats.append(read_heartbeats(job.running.store, 0, 1))

    job.on(WorkerLaunched, lambda event: len(job.started()) == 2 and job.lose('b'))
    job.on(NodeAwaited, note)
    job.on(NodeAwaited, lambda event: job.dead.clear(), nth=3)
    job.finish_when = lambda: len(job.started(1)) == 2
    store = job.on_hosts('ab', nodes=2, when_no_spare=WAIT).store
    for rank in range(2):  # both were in the round that the launcher ends
        sign(store, 'here/0', rank, 2)
    open_barrier(store, 'met/0')
    assert job.running.run() == 0
    assert job.seated() == [('a', 0), ('b', 1), ('b', 1)]
    assert ended(job) == {0: [0], 1: [-9, 0]}
    assert len(set(beats)) == 3
    assert {event.node for event in job.seen(NodeAwaited)} == {1}
    assert 'node 1 of the job has no host' in str(job.seen(NodeAwaited)[0])


def test_no_process_starts_while_the_job_waits(job: SlurmJob) -> None:
    started: list[int] = []

    def let_it_return(event: NodeAwaited) -> None:
        started.append(len(job.started()))
        job.dead.clear()

    job.on(WorkerLaunched, lambda event: len(job.started()) == 2 and job.lose('b'))
    job.on(NodeAwaited, let_it_return, nth=2)
    job.finish_when = lambda: len(job.started()) == 4
    assert job.on_hosts('ab', survive=False, nodes=2, when_no_spare=WAIT).run() == 0
    assert started == [2]
