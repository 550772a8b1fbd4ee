# SPDX-License-Identifier: Apache-2.0
"""A launcher that is signalled sends its workers their exit signal."""

import signal

import pytest

from tests.unit.launch.conftest import Job, ended

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ('flags', 'number'),
    [
        ('--exit-signal-handler', signal.SIGTERM),
        ('--exit-signal-handler --exit-signal SIGUSR1', signal.SIGUSR1),
        ('--exit-signal=SIGUSR2 --exit-signal-handler', signal.SIGUSR2),
        ('--exit-signal SIGUSR1', signal.SIGTERM),
        ('--exit-signal-handler --exit-signal SIGNOTHING', signal.SIGTERM),
    ],
)
def test_stop_sends_the_exit_signal_of_the_workers(
    job: Job, flags: str, number: signal.Signals
) -> None:
    job.on_event = lambda event: job.running.stop(143) if len(job.started()) == 2 else None
    job.finish_when = lambda: False
    assert job.run(*flags.split(), nodes=2) == 143
    assert ended(job) == {0: [-number], 1: [-number]}
