# SPDX-License-Identifier: Apache-2.0
"""All stages go back together in processes that live on, without a log; also to a dense checkpoint.

Processes are threads (`threaded_job`), and train a fake; every iteration has the bits of a
fault-free run.
"""

from pathlib import Path

import pytest

from moevement_ext.config import CHECKFREQ, GEMINI, GLOBAL
from moevement_ext.faults import Phase
from moevement_ext.recover import localized, verdict
from tests.support.quick import with_quick
from tests.unit.recover.test_recovery import DISTANCE, FIRST, VICTIMS
from tests.unit.recover.threaded_job import (
    OF_THREADS,
    STAGES,
    WINDOW,
    Expected,
    Fault,
    ThreadedJob,
    train,
)

ITERATIONS = FIRST + 6 * DISTANCE
LOST = Fault(1, Phase.FORWARD, FIRST + 1)

pytestmark = [pytest.mark.timed, *OF_THREADS]


def train_through(schedule: list[Fault], expected: Expected) -> ThreadedJob:
    iterations = max(fault.iteration for fault in schedule) + WINDOW + 1
    job = train(iterations, schedule, expected, recovery=GLOBAL)
    assert job.restarts == 0, 'survivors are not restarted'
    assert {event.scope for event in job.recovered} == {GLOBAL}
    assert all(event.stages == [*range(STAGES)] for event in job.recovered)
    assert all(event.replayed and not event.differing for event in job.recovered)
    assert job.evaluations == STAGES * [iterations]
    return job


@pytest.mark.parametrize('victim', with_quick(range(STAGES), 2))
def test_lost_worker_rolls_all_stages_back(victim: int, fault_free: Expected) -> None:
    phases = [Phase.FORWARD, Phase.P2P, Phase.NORM, Phase.STEP, Phase.AFTER_STEP, Phase.EVALUATE]
    schedule = [Fault(victim, phase, FIRST + DISTANCE * n) for n, phase in enumerate(phases)]
    job = train_through(schedule, fault_free)
    assert len(job.recovered) == STAGES * len(phases)
    assert len(job.histories) == 1 + len(phases), 'parts of before and after are joined'


def test_rollback_of_one_stage_fails(fault_free: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(*args: object, together: bool, **layout: object) -> verdict.Verdict:
        return verdict.decide_recovery(*args, **layout)  # type: ignore[arg-type]

    monkeypatch.setattr(localized, 'decide_recovery', alone)
    with pytest.raises(AssertionError, match='survivors are not restarted'):
        train_through([LOST], fault_free)


INTERVAL = 4
STRUCK = 11
"""Its newest checkpoint is of 8, before which there is one of 4."""


@pytest.mark.parametrize('strategy', [GEMINI, CHECKFREQ])
@pytest.mark.parametrize('victim', VICTIMS)
def test_a_worker_is_lost_between_two_checkpoints(
    victim: int, strategy: str, tmp_path: Path, fault_free: Expected
) -> None:
    phases = [Phase.FORWARD, Phase.NORM, Phase.STEP, Phase.AFTER_STEP]
    schedule = [Fault(victim, phase, STRUCK + 5 * n) for n, phase in enumerate(phases)]
    chosen = {'strategy': strategy, 'interval': INTERVAL}
    if strategy == CHECKFREQ:
        chosen['disk'] = str(tmp_path)
    job = train(STRUCK + 5 * len(phases), schedule, fault_free, **chosen)
    assert job.restarts == 0, 'survivors are not restarted'
    assert {event.scope for event in job.recovered} == {GLOBAL}
    assert not any(event.differing for event in job.recovered)
    assert all((event.target - event.replayed) % INTERVAL == 0 for event in job.recovered)
    assert max(event.replayed for event in job.recovered) > 1
