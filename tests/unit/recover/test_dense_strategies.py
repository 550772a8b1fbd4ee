# SPDX-License-Identifier: Apache-2.0
"""Gemini and CheckFreq: all stages go back to a checkpoint of several iterations ago.

Processes are threads (`threaded_job`), and train a fake; every iteration has the bits of a
fault-free run.
"""

from pathlib import Path

import pytest

from moevement_ext.config import CHECKFREQ, GEMINI, GLOBAL
from moevement_ext.faults import Phase
from tests.unit.recover.test_recovery import VICTIMS
from tests.unit.recover.threaded_job import OF_THREADS, Expected, Fault, train

INTERVAL = 4
STRUCK = 11
"""Its newest checkpoint is of 8, before which there is one of 4."""
PHASES = [Phase.FORWARD, Phase.NORM, Phase.STEP, Phase.AFTER_STEP]
DISTANCE = 5
ITERATIONS = STRUCK + DISTANCE * len(PHASES)

pytestmark = [pytest.mark.timed, *OF_THREADS]


@pytest.mark.parametrize('strategy', [GEMINI, CHECKFREQ])
@pytest.mark.parametrize('victim', VICTIMS)
def test_a_worker_is_lost_between_two_checkpoints(
    victim: int, strategy: str, tmp_path: Path, fault_free: Expected
) -> None:
    schedule = [Fault(victim, phase, STRUCK + DISTANCE * n) for n, phase in enumerate(PHASES)]
    chosen = {'strategy': strategy, 'interval': INTERVAL}
    if strategy == CHECKFREQ:
        chosen['disk'] = str(tmp_path)
    job = train(ITERATIONS, schedule, fault_free, **chosen)
    assert job.restarts == 0, 'survivors are not restarted'
    assert {event.scope for event in job.recovered} == {GLOBAL}
    assert not any(event.differing for event in job.recovered)
    assert all((event.target - event.replayed) % INTERVAL == 0 for event in job.recovered)
    assert max(event.replayed for event in job.recovered) > 1
