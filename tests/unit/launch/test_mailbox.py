# SPDX-License-Identifier: Apache-2.0
"""Statements of launches and processes that are gone, in a store that outlives them.

As in containers, where process ids start at 1, all workers have the same process id.
"""

import os
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from moevement_ext.launch.launcher_events import JobRecovered, WorkerLaunched
from moevement_ext.launch.remote import RemoteChild
from moevement_ext.membership import mailbox
from moevement_ext.membership.mailbox import (
    of_launch,
    read_files,
    write_files,
    write_finished,
    write_joining,
    write_survivors,
)
from tests.unit.launch.conftest import Job

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def containers(monkeypatch: pytest.MonkeyPatch) -> None:
    started = RemoteChild.started
    monkeypatch.setattr(RemoteChild, 'started', lambda child, pid: started(child, 3))


def state(job: Job, rank: int, launch: str, process: int) -> None:
    """Make all statements of a process whose work is done, and those of others about it."""
    store = job.running.store
    with pytest.MonkeyPatch.context() as there:
        there.setattr(os, 'getpid', lambda: 3)
        there.setenv('MOEVEMENT_LAUNCH', launch)
        there.setenv('MOEVEMENT_PROCESS', str(process))
        write_survivors(store)
        write_joining(store, rank)
        write_finished(store, rank, 0)
        mailbox.write_recovery(of_launch(store, launch), f'of {launch}')


@pytest.mark.parametrize('survive', [True, False])
def test_reports_of_an_earlier_launch_are_ignored(job: Job, survive: bool) -> None:
    def note(event: WorkerLaunched) -> None:
        state(job, event.rank, 'the one before', job.process(event.rank))
        if len(job.started()) == 2:
            job.touch('strike')

    job.on(WorkerLaunched, note, restarts=0)
    job.finish_when = lambda: len(job.started(1)) == 2 and bool(survive or job.started(0)[1:])
    assert job.run('1.0=kill:strike', nodes=2, survive=survive) == 0
    assert len(job.started(0)) == (1 if survive else 2) and len(job.started(1)) == 2
    assert job.seen(JobRecovered) == []


def test_statements_of_a_predecessor_are_not_those_of_the_process(job: Job) -> None:
    """They are read after its successor has started: it is not done."""
    numbers: list[int] = []

    def note(event: WorkerLaunched) -> None:
        numbers.append(job.process(1))
        if event.restarts == 1:
            state(job, 1, job.running.config.launch, numbers[0])
        job.touch('strike' if event.restarts == 0 else 'again')

    job.on(WorkerLaunched, note, rank=1)
    job.finish_when = lambda: len(job.started(1)) == 3 and bool(job.seen(JobRecovered))
    assert job.run('1.0=kill:strike', '1.1=kill:again', nodes=2) == 0
    assert [event.line for event in job.seen(JobRecovered)] == [f'of {job.running.config.launch}']
    assert len(set(numbers)) == 3
    ends = [mailbox.read_death(job.mailbox, number) for number in numbers]
    assert [end is not None for end in ends] == [True, True, False]


def test_second_file_report_of_a_rank_replaces_the_first() -> None:
    """A worker may be replaced before the other ranks have reported."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    for files in (b'first', b'again'):
        write_files(store, 0, files)
        assert read_files(store, world_size=2) is None
    write_files(store, 1, b'other')
    assert read_files(store, world_size=2) == [b'again', b'other']
