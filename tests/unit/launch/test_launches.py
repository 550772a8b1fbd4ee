# SPDX-License-Identifier: Apache-2.0
"""Successive launches with equal process ids, in a store that outlives them.

As in containers, where process ids start at 1.
"""

import os

import pytest

from moevement_ext.events import Event
from moevement_ext.launch.launcher_events import WorkerEvicted, WorkerLaunched
from moevement_ext.launch.statements import tell_finished, tell_joining, tell_survivors
from moevement_ext.membership.eviction import evict
from tests.unit.launch.conftest import Job

pytestmark = pytest.mark.timeout(120)


def report_from_an_earlier_launch(job: Job, event: WorkerLaunched) -> None:
    """Report as a process of an earlier launch with the id of the worker that has just started."""
    with pytest.MonkeyPatch.context() as earlier:
        earlier.setenv('MOEVEMENT_LAUNCH', 'the one before')
        earlier.setattr(os, 'getpid', lambda: event.pid)
        store = job.running.store
        tell_survivors(store)
        tell_joining(store, event.rank)
        tell_finished(store, event.rank, 0)
        evict(store, event.rank, event.pid)


@pytest.mark.parametrize('survive', [True, False])
def test_reports_of_an_earlier_launch_are_ignored(job: Job, survive: bool) -> None:
    def note(event: Event) -> None:
        if isinstance(event, WorkerLaunched) and event.restarts == 0:
            report_from_an_earlier_launch(job, event)
            if len(job.started()) == 2:
                job.touch('strike')

    job.on_event = note
    job.finish_when = lambda: len(job.started(1)) == 2 and bool(survive or job.started(0)[1:])
    assert job.run('1.0=kill:strike', nodes=2, survive=survive) == 0
    assert len(job.started(0)) == (1 if survive else 2) and len(job.started(1)) == 2
    assert job.seen(WorkerEvicted) == []


def test_each_launch_passes_a_unique_name_to_its_workers(job: Job) -> None:
    names = []
    for _ in range(2):
        (job.folder / 'finish').unlink(missing_ok=True)
        assert job.run() == 0
        names.append(job.attempt(0)['env']['MOEVEMENT_LAUNCH'])
        assert names[-1] == job.running.config.launch
    assert len(set(names)) == 2
