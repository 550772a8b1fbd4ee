# SPDX-License-Identifier: Apache-2.0
"""Gemini and CheckFreq: all stages go back to a checkpoint of several iterations ago.

Processes are threads (`threaded_job`), and train a fake; every iteration has the bits of a
fault-free run.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moevement_ext.config import AUTO, CHECKFREQ, GEMINI, GLOBAL, SparseCheckpointConfig
from moevement_ext.faults import Phase
from moevement_ext.plan.replanning import Cycle, WindowLoad
from moevement_ext.plan.strategy import dense
from moevement_ext.plan.strategy.choice import Strategy
from moevement_ext.protect import protection
from moevement_ext.protect.replanner import Replanner
from tests.unit.recover.fake_trainer import FakeTrainer
from tests.unit.recover.test_recovery import VICTIMS
from tests.unit.recover.threaded_job import (
    OF_THREADS,
    STAGES,
    Expected,
    Fault,
    ThreadedJob,
    spy,
    train,
)
from tests.unit.replicate.peers import wait_for

INTERVAL = 4
STRUCK = 11
"""Its newest checkpoint is of 8, before which there is one of 4."""
PHASES = [Phase.FORWARD, Phase.NORM, Phase.STEP, Phase.AFTER_STEP]
DISTANCE = 5
ITERATIONS = STRUCK + DISTANCE * len(PHASES)

pytestmark = [pytest.mark.timed, *OF_THREADS]
Launch = Callable[..., ThreadedJob]


@pytest.fixture
def launch(request: pytest.FixtureRequest, tmp_path: Path, fault_free: Expected) -> Launch:
    """Train through faults with a strategy, the parameter of the fixture."""
    chosen: dict[str, Any] = {'strategy': request.param, 'interval': INTERVAL}
    if request.param == CHECKFREQ:
        chosen['disk'] = str(tmp_path)

    def train_through(schedule: list[Fault], iterations: int) -> ThreadedJob:
        job = train(iterations, schedule, fault_free, **chosen)
        assert job.restarts == 0, 'survivors are not restarted'
        assert {event.scope for event in job.recovered} == {GLOBAL}
        assert not any(event.differing for event in job.recovered)
        return job

    return train_through


def starts(job: ThreadedJob) -> set[int]:
    return {event.target - event.replayed for event in job.recovered}


BOTH = pytest.mark.parametrize('launch', [GEMINI, CHECKFREQ], indirect=True)
ON_DISK = pytest.mark.parametrize('launch', [CHECKFREQ], indirect=True)


@BOTH
@pytest.mark.parametrize('victim', VICTIMS)
def test_a_worker_is_lost_between_two_checkpoints(victim: int, launch: Launch) -> None:
    schedule = [Fault(victim, phase, STRUCK + DISTANCE * n) for n, phase in enumerate(PHASES)]
    job = launch(schedule, ITERATIONS)
    assert all(start % INTERVAL == 0 for start in starts(job))
    assert max(event.replayed for event in job.recovered) > 1


@ON_DISK
def test_all_ranks_change_their_interval(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[tuple[int, int]] = []
    done: set[tuple[Replanner, int]] = set()
    strategy_of = protection.strategy_of

    def tuned(config: SparseCheckpointConfig, *given: Any) -> Strategy:
        return strategy_of(replace(config, interval=AUTO), *given)

    def adopts(rank: protection.Protection, plan: Cycle) -> None:
        changes.append((plan.origin, plan.period))

    def followed(job: ThreadedJob, rank: int, trainer: FakeTrainer) -> None:
        if trainer.iteration == 10 and not job.recovered:
            wait_for(lambda: len(changes) >= STAGES)

    def measured(**figures: Any) -> WindowLoad:
        """A load with the first copy to disk, however late that is."""
        return msgspec.structs.replace(WindowLoad(**figures), persist_s=0.01)

    def observed(replanner: Replanner, load: WindowLoad) -> None:
        """No rank is so slow that its load is skipped: none hears of a plan without one."""
        if len(changes) < STAGES:
            wait_for(lambda: (replanner, load.start) in done)

    spy(monkeypatch, Replanner, 'observe', observed, after=True)
    spy(monkeypatch, Replanner, '_publish', lambda it, load: done.add((it, load.start)), after=True)
    spy(monkeypatch, ThreadedJob, 'note', followed, after=True)
    spy(monkeypatch, protection.Protection, '_adopt', adopts, after=True)
    monkeypatch.setattr(protection, 'WindowLoad', measured)
    monkeypatch.setattr(protection, 'strategy_of', tuned)
    monkeypatch.setattr(dense, 'shortest_interval', lambda *measured: 3)
    job = launch([Fault(1, Phase.FORWARD, 22)], 24)
    assert len(changes) in (STAGES, STAGES + 1), 'the new process may hear of it by itself'
    ((origin, interval),) = set(changes)
    (start,) = starts(job)
    assert interval == 3 and start > origin and (start - origin) % interval == 0
