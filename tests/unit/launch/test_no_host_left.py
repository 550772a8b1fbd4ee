# SPDX-License-Identifier: Apache-2.0
"""A host is lost and no spare is left: the job goes on with fewer hosts, or waits for it.

Under the launcher for Slurm, on its fictitious hosts.
"""

import signal
import time

import pytest

from moevement_ext.config import ConfigurationError
from moevement_ext.launch import node, supervisor
from moevement_ext.launch.launch_config import GUESTS, LAYOUT, WAIT, LaunchConfig
from moevement_ext.launch.launcher_events import (
    AllStartAgain,
    NodeReady,
    WorkerEnded,
    WorkerLaunched,
)
from moevement_ext.membership.mailbox import read_cause
from tests.unit.launch.conftest import ended
from tests.unit.launch.on_hosts import SlurmJob
from tests.unit.launch.test_guests import keep_windows, report_files
from tests.unit.memory.samples import tmpfs_directory

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]
JOB = SlurmJob
ABC = [('a', 0), ('b', 1), ('c', 2)]
ELASTIC = '--sparse-ckpt-elastic', 'restart'


@pytest.fixture(autouse=True)
def hosts_are_tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, '_FIRST_PAUSE_S', 1.0)


def sizes(job: SlurmJob) -> list[int | None]:
    return [event.nodes for event in job.seen(AllStartAgain)]


def lose_b(job: SlurmJob, of: int) -> None:
    """Lose the host b once so many workers have started."""
    job.on(WorkerLaunched, lambda event: len(job.started()) == of and job.lose('b'))


def test_job_waits_for_a_lost_host(job: SlurmJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, '_SAY_AGAIN_S', 0.5)
    causes = []

    def note(event: WorkerLaunched) -> None:
        causes.append(read_cause(job.mailbox, event.restarts))

    lose_b(job, 2)
    job.on(AllStartAgain, lambda event: job.dead.clear(), nth=3)
    job.on(WorkerLaunched, note)
    job.finish_when = lambda: len(job.started()) == 4
    assert job.on_hosts('ab', nodes=2, when_no_spare=WAIT).run() == 0
    assert sizes(job)[:3] == [0, 0, 0] and sizes(job)[-1] == 2
    assert 'the job waits for nodes, since node 1 of the job has no host' in str(
        job.seen(AllStartAgain)[0]
    )
    assert job.seated() == [('a', 0), ('b', 1), ('a', 0), ('b', 1)]
    assert [causes[-1].rank, causes[-1].how.endswith('was lost with host b')] == [1, True]
    assert ended(job) == {0: [0], 1: [-9, 0]}


@pytest.mark.parametrize('ends', [False, True])
def test_job_goes_on_with_fewer_hosts_and_grows_again(ends: bool, job: SlurmJob) -> None:
    """With the host that has returned, unless the job ends by itself at that moment."""
    at: list[float] = []

    def let_it_return(event: WorkerLaunched) -> None:
        report_files(job, memory, 2)
        job.dead.clear()

    def finish(event: WorkerEnded) -> None:
        for rank in range(2):
            job.mailbox.set(f'finished/{rank}', f'{job.process(rank)} 0')

    lose_b(job, 3)
    job.on(WorkerLaunched, let_it_return, rank=1, restarts=2)
    job.on(WorkerEnded, finish, code=-signal.SIGTERM)
    job.on(NodeReady, lambda event: at.append(time.monotonic()), nth=4)
    job.on(AllStartAgain, lambda event: at.append(time.monotonic()), nth=2)
    job.finish_when = lambda: len(job.started()) == 8
    with tmpfs_directory() as memory:
        running = job.on_hosts('abc', *ELASTIC, nodes=3, when_no_spare=LAYOUT, grow_after_s=1.0)
        report_files(job, memory, 3)
        if not ends:  # otherwise it has freed its windows
            keep_windows(memory, 'a', 0, 0)
        assert running.run() == 0
    assert sizes(job) == ([2] if ends else [2, 3])
    assert job.seated()[3:] == [('a', 0), ('c', 1), *([] if ends else ABC)]
    assert ended(job)[0] == ([-15] if ends else [-15, 0])
    env = job.attempt(1, 2)['env']
    assert (env['WORLD_SIZE'], env['MOEVEMENT_NODE'], env['GROUP_RANK']) == ('2', 'c', '1')
    ready, *again = at
    assert ends or again[-1] >= ready + 1.0


def test_job_has_the_number_of_hosts_that_its_program_names(job: SlurmJob) -> None:
    lose_b(job, 3)
    job.on(AllStartAgain, lambda event: job.dead.clear(), nth=2)
    job.finish_when = lambda: len(job.started()) == 9
    refusing = [
        f'{rank}.2={action}' for rank in range(2) for action in ('print:Start 1 ranks', 'exit:2')
    ]
    settings = {'nodes': 3, 'when_no_spare': LAYOUT, 'grow_after_s': 0.0}
    assert job.on_hosts('abc', *ELASTIC, *refusing, **settings).run() == 0
    assert sizes(job) == [2, 1, 3]


def test_layout_needs_a_program_that_reads_windows_of_others(job: SlurmJob) -> None:
    exact = *ELASTIC, '--sparse-ckpt-elastic-exact'
    for flags in ((), exact):
        with pytest.raises(ConfigurationError, match='--sparse-ckpt-elastic restart, without'):
            LaunchConfig('program.py', flags, nodes=2, when_no_spare=LAYOUT)
        with pytest.raises(ConfigurationError, match='--layout-after: needs --when-no-spare'):
            LaunchConfig('program.py', flags, 2, when_no_spare=GUESTS, layout_after_s=9.0)
    assert LaunchConfig('program.py', exact, nodes=2, when_no_spare=GUESTS).sizes == {2}
    assert LaunchConfig('program.py', ELASTIC, nodes=2, when_no_spare=GUESTS).sizes == {1, 2}
