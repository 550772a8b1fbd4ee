# SPDX-License-Identifier: Apache-2.0
"""Dead workers that are not replaced."""

import pytest

from moevement_ext.errors import EXIT_OTHER_BITS, EXIT_USER_ERROR, EXIT_WHOLE_JOB
from tests.unit.launch.conftest import Job, failure

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]


@pytest.mark.parametrize('survive', [True, False])
def test_user_error_at_the_start_ends_the_job(job: Job, survive: bool) -> None:
    job.finish_when = lambda: False
    again = [f'1.{attempt}=exit:{EXIT_USER_ERROR}' for attempt in range(3)]
    flags = ('1.0=print:no such flag', *again)
    assert job.run(*flags, survive=survive, nodes=2) == EXIT_USER_ERROR
    first, *lines = failure(job).splitlines()
    assert first.startswith('rank 1 ') and 'refuses what it was started with' in first
    assert lines[-1] == '    no such flag'
    assert len(job.started()) == 2


def test_user_error_of_a_replacement_does_not_end_the_job(job: Job) -> None:
    """For example, its node temporarily lacks memory."""
    job.finish_when = lambda: len(job.started(1)) == 3
    assert job.run('1.0=kill', f'1.1=exit:{EXIT_USER_ERROR}', nodes=2) == 0
    assert len(job.started(0)) == 1


@pytest.mark.parametrize('survive', [True, False])
def test_other_bits_of_a_recovery_end_the_job(job: Job, survive: bool) -> None:
    """A replacement, as here, would begin the same replay."""
    job.finish_when = lambda: False
    flags = ('1.0=kill', f'1.1=exit:{EXIT_OTHER_BITS}')
    assert job.run(*flags, survive=survive, nodes=2) == EXIT_OTHER_BITS
    assert 'a recovery computed other bits' in failure(job)
    assert len(job.started(1)) == 2


def test_loss_of_all_ranks_is_one_restart_of_each(job: Job) -> None:
    job.finish_when = lambda: len(job.started()) == 6
    flags = [f'{rank}.0=exit:{EXIT_WHOLE_JOB}' for rank in range(3)]
    assert job.run(*flags, nodes=3, max_restarts=1) == 0
