# SPDX-License-Identifier: Apache-2.0
"""No rank is assigned to a host with an unusable GPU. Real agents with a fake driver."""

import pytest

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.launch.launcher_events import (
    DevicesFailing,
    WorkerLaunched,
)
from tests.support.readable import dies
from tests.unit.launch.conftest import failure
from tests.unit.launch.on_hosts import SlurmJob

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]
JOB = SlurmJob


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
