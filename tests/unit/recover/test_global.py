# SPDX-License-Identifier: Apache-2.0
"""All stages go back together in processes that live on, without a log.

Processes are threads (`threaded_job`), and train a fake.
"""

import pytest

from moevement_ext.config import GLOBAL
from moevement_ext.faults import Phase
from moevement_ext.recover import localized, verdict
from moevement_ext.recover.stage_replay import StageReplay
from tests.support.quick import with_quick
from tests.unit.recover.test_recovery import DISTANCE, FIRST
from tests.unit.recover.threaded_job import (
    OF_THREADS,
    STAGES,
    WINDOW,
    Expected,
    Fault,
    ThreadedJob,
    spy,
    train,
)

ITERATIONS = FIRST + 6 * DISTANCE
LOST = Fault(1, Phase.FORWARD, FIRST + 1)
OF_A_REPLAY = [Phase.FETCH, Phase.LOAD, Phase.CONVERT, Phase.CATCH_UP, Phase.REPLAYED]
OF_ANY = [Phase.DETECT, Phase.REGROUP, Phase.CONNECT, Phase.RESUME]

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


@pytest.mark.parametrize(
    'phase', with_quick(OF_A_REPLAY + OF_ANY, Phase.CONVERT, Phase.REPLAYED, Phase.CONNECT)
)
def test_loss_during_a_recovery_is_recovered(phase: Phase, fault_free: Expected) -> None:
    job = train_through([LOST, Fault(0, phase)], fault_free)
    assert len(job.recovered) >= STAGES  # some were back before the last of these points
    assert {event.went_on for event in job.recovered} == {0}


def test_nothing_is_logged(fault_free: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    logs: list[object] = []
    spy(monkeypatch, StageReplay, 'run', lambda it, *_: logs.append(it._protection.memory.log))
    train_through([LOST], fault_free)
    assert logs == STAGES * [None]


def test_rollback_of_one_stage_fails(fault_free: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(*args: object, together: bool, **layout: object) -> verdict.Verdict:
        return verdict.decide_recovery(*args, **layout)  # type: ignore[arg-type]

    monkeypatch.setattr(localized, 'decide_recovery', alone)
    with pytest.raises(AssertionError, match='survivors are not restarted'):
        train_through([LOST], fault_free)
