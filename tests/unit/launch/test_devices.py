# SPDX-License-Identifier: Apache-2.0
"""No rank is assigned to a host with an unusable GPU. Real agents with a fake driver."""

import pytest

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.launch.launcher_events import (
    DevicesFailing,
    WorkerLaunched,
)
from tests.unit.launch.conftest import failure
from tests.unit.launch.on_hosts import SlurmJob
from tests.unit.readable import dies

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]
JOB = SlurmJob


def failing(job: SlurmJob) -> list[tuple[str, str, bool]]:
    return [(event.host, event.trouble, event.usable) for event in job.seen(DevicesFailing)]


def test_spare_host_replaces_a_host_with_a_lost_device(job: SlurmJob) -> None:
    """The worker there hangs, as in a collective, and the launcher does not wait for it."""
    devices = job.devices('b')

    job.on(WorkerLaunched, lambda event: devices.fail('GPU-0', 79), rank=1, restarts=0)
    job.finish_when = lambda: len(job.started(1)) == 2
    assert job.on_hosts('abc', nodes=2).run() == 0
    assert job.seated() == [('a', 0), ('b', 1), ('c', 1)]
    assert failing(job) == [('b', 'GPU GPU-0: Xid 79: it has fallen off the bus', False)]
    assert dies(job.started(1)[0].pid)
    assert job.attempt(1, 1)['env']['MOEVEMENT_NODE'] == 'c'
    assert len(job.steps['b']) == 1  # the host is not tried again


def test_host_with_a_lost_device_gets_no_rank(job: SlurmJob) -> None:
    job.devices('a').set('GPU-0', action=1)
    job.finish_when = lambda: len(job.started()) == 2
    assert job.on_hosts('abc', nodes=2).run() == 0
    assert job.seated() == [('b', 0), ('c', 1)]
    trouble = 'GPU GPU-0: the driver asks for a reset of the GPU'
    assert failing(job) == [('a', trouble, False)]


def test_job_without_a_usable_host_ends(job: SlurmJob) -> None:
    job.devices('b').set('GPU-0', lost=True)
    assert job.on_hosts('ab', nodes=2).run() == EXIT_WHOLE_JOB
    assert '(b: GPU GPU-0: the driver does not reach it)' in failure(job)


def test_host_with_a_worn_device_is_the_last_choice(job: SlurmJob) -> None:
    """A worn device alone does not stop a rank."""
    job.devices('a').set('GPU-0', action=4)  # reset recommended after the job
    job.on(WorkerLaunched, lambda event: job.lose('b'), rank=0, restarts=0)
    job.finish_when = lambda: len(job.started(0)) == 2
    assert job.on_hosts('ab', nodes=1).run() == 0
    assert job.seated() == [('b', 0), ('a', 0)]
    assert [usable for _, _, usable in failing(job)] == [True]
