# SPDX-License-Identifier: Apache-2.0
"""How a job came back after a fault, read out of its events and its log."""

from collections.abc import Sequence
from typing import Any

import pytest

from moevement_ext.events import (
    Event,
    FailureDetected,
    NextTier,
    Protected,
    Recovered,
    RecoveryStarted,
    WindowPersisted,
    WorkerStarted,
)
from tests.unit.tools.samples import happened
from tools.lab.evidence import Recovery, Tier, lost_iterations, recovers_locally, recovery
from tools.lab.run_log import Iteration

FAULT_AT = 100.0


def logged(*pairs: tuple[int, float]) -> list[Iteration]:
    return [Iteration(time, number, 200.0, 5.0) for number, time in pairs]


def localized(rank: int, time: float, pid: int | None = None, replayed: int = 0) -> Event:
    fields: Any = {'scope': 'localized', 'target': 40, 'replayed': replayed}
    return happened(Recovered, rank, time, pid, **fields)


def found(events: Sequence[Event], pids: Sequence[int], *pairs: tuple[int, float]) -> Any:
    return recovery(sorted(events, key=lambda item: item.time), pids, FAULT_AT, logged(*pairs))


class TestRecovery:
    SURVIVORS = [localized(0, 102.0), happened(FailureDetected, 1, 100.2), localized(1, 102.1)]
    ALL = [*SURVIVORS, happened(WorkerStarted, 2, 100.5, 99), localized(2, 102.2, 99, replayed=4)]

    def test_localized_recovery_is_recognised(self) -> None:
        assert found(self.ALL, [10, 11, 99], (40, 99.9)) == Recovery(
            Tier.LOCALIZED, 102.2, 40, 4, 1
        )

    @pytest.mark.parametrize(
        ('events', 'last_pid'),
        [
            pytest.param(SURVIVORS, 99, id='a rank is missing'),
            pytest.param(ALL, 98, id='report of an earlier process'),
            pytest.param([*ALL, happened(FailureDetected, 0, 103.0)], 99, id='failed again'),
        ],
    )
    def test_job_has_not_recovered(self, events: list[Event], last_pid: int) -> None:
        assert found(events, [10, 11, last_pid], (40, 99.9)) is None

    def test_whole_job_recovery_is_recognised(self) -> None:
        tier = {'reason': 'no log', 'tier': 'the whole job'}
        events = [happened(NextTier, 0, 100.5, **tier)]
        for rank in range(2):
            events.append(happened(WorkerStarted, rank, 101.0, 50 + rank))
            events.append(happened(RecoveryStarted, rank, 102.0, 50 + rank, start=36, dense_at=39))
            events.append(happened(Recovered, rank, 103.0 + rank, 50 + rank, replayed=4))
        back = found(events, [50, 51], (40, 99.0))
        assert back == Recovery(Tier.WHOLE_JOB, 104.0, 40, 4, 2)

    def test_restart_from_the_beginning_is_recognised(self) -> None:
        events = [happened(WorkerStarted, rank, 101.0, 50 + rank) for rank in range(2)]
        assert found(events, [50, 51], (40, 99.0)) is None
        back = found(events, [50, 51], (40, 99.0), (1, 103.0), (2, 103.5))
        assert back == Recovery(Tier.DISK, 103.0, 0, 0, 2)


def test_job_with_an_upstream_log_recovers_locally() -> None:
    fields: Any = {
        'node': 'n', 'stage': 0, 'world_size': 2, 'copies': 1, 'replicas': 1, 'window': 2,
        'operators': {}, 'experts': [],
    }  # fmt: skip
    rings = [happened(Protected, 0, 1.0, host_memory={'log_ring': n}, **fields) for n in (0, 64)]
    assert not recovers_locally(rings[:1])
    assert recovers_locally(rings)


class TestLostIterations:
    def test_iteration_logged_between_fault_and_recovery_is_lost(self) -> None:
        back = Recovery(Tier.WHOLE_JOB, 103.0, 40, 4, 4)
        assert lost_iterations(back, logged((40, 99.0), (41, 100.1), (42, 104.0)), []) == 1

    def test_dense_checkpoint_newer_than_every_window_loses_nothing(self) -> None:
        back = Recovery(Tier.DISK, 103.0, 7, 0, 4)
        trained = logged((7, 98.0), (8, 99.0), (8, 103.0))
        newest = happened(WindowPersisted, 0, 97.0, start=5)
        later = happened(WindowPersisted, 0, 104.0, start=9)
        assert lost_iterations(back, trained, [newest, later]) == 0
        assert lost_iterations(back, trained, []) == 1
        assert lost_iterations(back._replace(target=4), trained, [newest]) == 4
        first = happened(WindowPersisted, 0, 97.0, start=0)
        assert lost_iterations(back, trained, [first]) == 0
        assert lost_iterations(back._replace(target=0), trained, [first]) == 8, 'from the start'
