# SPDX-License-Identifier: Apache-2.0
"""A stage is lost while another one replays: which replays continue, and which begin again.

Of three stages the first and the last are no neighbours; processes are threads (`threaded_job`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from moevement_ext.faults import Phase
from moevement_ext.membership.report import Report
from moevement_ext.recover.localized import LocalizedRecovery
from moevement_ext.recover.rank_state import ForbiddenTransition
from moevement_ext.recover.stage_replay import StageReplay
from moevement_ext.replicate.client import LogReader
from tests.support.quick import with_quick
from tests.unit.recover.test_recovery import DISTANCE, FIRST, train_through
from tests.unit.recover.threaded_job import OF_THREADS, WINDOW, Expected, Fault, ThreadedJob

OF_A_REPLAY = [Phase.FETCH, Phase.LOAD, Phase.CONVERT, Phase.CATCH_UP, Phase.REPLAYED]
LOST = Fault(0, Phase.FORWARD, FIRST + 1)
"""The first stage, where two iterations are to be caught up with."""
ITERATIONS = FIRST + 10 + DISTANCE

pytestmark = [pytest.mark.timed, *OF_THREADS]


def went_on(job: ThreadedJob) -> Counter[int]:
    """How often, by rank, those went on that replayed."""
    return Counter(event.went_on for event in job.recovered if event.replayed)


@pytest.mark.parametrize('phase', with_quick(OF_A_REPLAY, Phase.CONVERT))
def test_replay_continues_when_a_distant_stage_is_lost(phase: Phase, fault_free: Expected) -> None:
    job = train_through([LOST, Fault(0, phase, kills=2)], fault_free)
    assert sorted(job.began) == [0, 2]
    assert went_on(job) == {1: 1, 0: 1}
    assert any(event.verified for event in job.recovered if event.replayed)


@pytest.mark.parametrize('phase', with_quick(OF_A_REPLAY, Phase.LOAD, Phase.REPLAYED))
def test_a_replay_begins_again_when_a_neighbour_is_lost(phase: Phase, fault_free: Expected) -> None:
    job = train_through([LOST, Fault(0, phase, kills=1)], fault_free)
    through, again = [0, 1], [0, 0, 1]
    assert sorted(job.began) in ([through] if phase is Phase.REPLAYED else [through, again])
    assert set(went_on(job)) == {0}


def test_frequent_failures_of_distant_stages_do_not_delay_a_replay(fault_free: Expected) -> None:
    steps = [Phase.FETCH, *WINDOW * [Phase.LOAD], Phase.CATCH_UP, Phase.CATCH_UP, Phase.REPLAYED]
    job = train_through([LOST, *(Fault(0, step, kills=2) for step in steps)], fault_free)
    assert job.began.count(0) == 1
    assert went_on(job) == {len(steps): 1, 0: 1}


def test_neighbours_lost_in_turn_delay_each_other(
    fault_free: Expected,
) -> None:
    """Each new process is lost with all that it had replayed, which the other one then waits for.

    Then both come back together, from the window that they had in the first place.
    """
    turns = [Fault(replays, Phase.CONVERT, kills=1 - replays) for replays in 3 * [0, 1]]
    job = train_through([LOST, *turns], fault_free)
    last = [event for event in job.recovered if event.replayed]
    assert sorted(job.began)[-2:] == [1, 1] and job.began.count(2) == 0
    assert {event.target for event in last} == {FIRST}
    assert set(went_on(job)) == {0}
    assert any(event.verified for event in last)


def test_lost_holders_windows_count_again_later(fault_free: Expected, withdrawn: list[int]) -> None:
    lost = LOST._replace(rank=2)
    job = train_through([lost, Fault(2, Phase.CATCH_UP, kills=0)], fault_free)
    assert went_on(job) == {1: 1, 0: 1}
    assert withdrawn == [1, 2], 'those whose replicas were on the first node, and on the second'


def ends_too_early(monkeypatch: pytest.MonkeyPatch, has_met: list[Sequence[Report]]) -> None:
    catch_up = StageReplay._catch_up

    def to_another_end(replay: StageReplay, dense_at: int, target: int, *rest: Any) -> None:
        catch_up(replay, dense_at, target - len(has_met), *rest)

    monkeypatch.setattr(StageReplay, '_catch_up', to_another_end)


def reads_other_tensors(monkeypatch: pytest.MonkeyPatch, has_met: list[Sequence[Report]]) -> None:
    """As if its source were another once all have met."""
    take = LogReader.take

    def take_another(reader: LogReader, *key: int) -> torch.Tensor:
        return take(reader, *key) ^ len(has_met)

    monkeypatch.setattr(LogReader, 'take', take_another)


@pytest.mark.parametrize('breaking', [ends_too_early, reads_other_tensors])
def test_wrongly_continued_replay_is_detected(
    breaking: Callable[..., None], fault_free: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_met: list[Sequence[Report]] = []
    goes_on = LocalizedRecovery._goes_on

    def noted(recovery: LocalizedRecovery, reports: Sequence[Report]) -> bool:
        has_met.append(reports)
        return goes_on(recovery, reports)

    monkeypatch.setattr(LocalizedRecovery, '_goes_on', noted)
    breaking(monkeypatch, has_met)
    train_through([LOST], fault_free)
    with pytest.raises((AssertionError, ForbiddenTransition)):
        train_through([LOST, Fault(0, Phase.CONVERT, kills=2)], fault_free)
    assert len(has_met) == 1
