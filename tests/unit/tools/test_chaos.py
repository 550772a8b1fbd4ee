# SPDX-License-Identifier: Apache-2.0
"""Chaos: what a seed draws, and what is read out of the events and the log of a struck job."""

from collections.abc import Sequence
from typing import Any

import pytest

from tools.chaos.__main__ import parse_arguments, summary
from tools.chaos.evidence import Recovery, Tier, lost_iterations, persisted, recovery
from tools.chaos.flags import parse_layout
from tools.chaos.plan import Fault, Kind, draw_faults, draw_window
from tools.chaos.striking import Outcome
from tools.plot_run import Iteration

KINDS = list(Kind)
STRUCK = 100.0


def logged(*pairs: tuple[int, float]) -> list[Iteration]:
    """Iterations of pairs of number and seconds."""
    return [Iteration(time, number, 200.0, 5.0) for number, time in pairs]


def event(rank: int, name: str, time: float, pid: int | None = None, **fields: Any) -> dict:
    found = {'event': name, 'rank': rank, 'time': time, 'iteration': 0, **fields}
    return {'pid': 10 + rank if pid is None else pid, **found}


def localized(rank: int, time: float, pid: int | None = None, replayed: int = 0) -> dict:
    fields = {'scope': 'localized', 'target': 40, 'replayed': replayed}
    return event(rank, 'recovered', time, pid, **fields)


def found(events: Sequence[dict], pids: Sequence[int], *pairs: tuple[int, float]) -> Any:
    return recovery(sorted(events, key=lambda item: item['time']), pids, STRUCK, logged(*pairs))


def outcome(tier: Tier, lost: int = 0) -> Outcome:
    fault = Fault(Kind.KILL, (1,), 3, 0.5)
    return Outcome(fault, 40, Recovery(tier, 103.0, 40, 4, 1), 3.0, lost, [])


class TestPlan:
    def test_a_seed_stands_for_the_same_faults(self) -> None:
        assert draw_faults(7, 30, KINDS, 2, 2) == draw_faults(7, 30, KINDS, 2, 2)
        assert draw_faults(7, 30, KINDS, 2, 2) != draw_faults(8, 30, KINDS, 2, 2)

    @pytest.mark.parametrize('kinds', [KINDS, [Kind.KILL], [Kind.NODE]])
    def test_no_two_faults_are_alike(self, kinds: list[Kind]) -> None:
        faults = draw_faults(3, 60, kinds, 2, 1)
        assert len({(fault.kind, fault.victims, fault.after) for fault in faults}) == 60
        assert {fault.kind for fault in faults} == set(kinds)

    def test_ten_faults_have_all_kinds(self) -> None:
        assert {fault.kind for fault in draw_faults(1, 10, KINDS, 4, 1)} == set(Kind)

    def test_victims(self) -> None:
        for fault in draw_faults(5, 200, KINDS, 2, 2):
            match fault.kind:
                case Kind.NODE:
                    assert fault.victims in ((0, 1), (2, 3)) and not fault.apart_s
                case Kind.DOUBLE:
                    assert len(fault.victims) == 2
                    assert fault.apart_s or fault.victims[0] != fault.victims[1]
                case _:
                    assert len(fault.victims) == 1 and not fault.apart_s
            assert set(fault.victims) <= set(range(4))
            assert fault.after >= 0 and 0.0 <= fault.phase <= 2.0

    def test_some_strike_at_once_and_some_double_the_same_rank(self) -> None:
        faults = draw_faults(5, 100, KINDS, 2, 2)
        assert any(fault.after == 0 for fault in faults)
        doubles = [fault for fault in faults if fault.kind is Kind.DOUBLE]
        assert any(fault.victims[0] == fault.victims[1] for fault in doubles)
        assert any(not fault.apart_s for fault in doubles)

    def test_windows_of_consecutive_jobs_differ(self) -> None:
        windows = [draw_window(11, job, 6) for job in range(6)]
        assert sorted(windows) == [1, 2, 3, 4, 5, 6]


class TestRecovery:
    SURVIVORS = [localized(0, 102.0), event(1, 'failure_detected', 100.2), localized(1, 102.1)]
    NEWCOMER = [event(2, 'worker_started', 100.5, 99), localized(2, 102.2, 99, replayed=4)]

    def test_localized(self) -> None:
        back = found([*self.SURVIVORS, *self.NEWCOMER], [10, 11, 99], (40, 99.9))
        assert back == Recovery(Tier.LOCALIZED, 102.2, 40, 4, 1)

    def test_not_back_while_a_rank_is_missing(self) -> None:
        assert found(self.SURVIVORS, [10, 11, 99], (40, 99.9)) is None

    def test_what_an_earlier_process_reported_does_not_count(self) -> None:
        assert found([*self.SURVIVORS, *self.NEWCOMER], [10, 11, 98], (40, 99.9)) is None

    def test_an_earlier_recovery_does_not_count(self) -> None:
        earlier = [localized(rank, 99.0) for rank in range(3)]
        assert found(earlier, [10, 11, 12], (40, 99.9), (41, 100.1)) is None

    def test_a_failure_after_the_recovery_counts(self) -> None:
        later = event(0, 'failure_detected', 103.0)
        assert found([*self.SURVIVORS, *self.NEWCOMER, later], [10, 11, 99], (41, 102.9)) is None

    def test_whole_job(self) -> None:
        tier = {'reason': 'no log', 'tier': 'the whole job'}
        events = [event(0, 'next_tier', 100.5, **tier)]
        for rank in range(2):
            events.append(event(rank, 'worker_started', 101.0, 50 + rank))
            events.append(event(rank, 'recovery_started', 102.0, 50 + rank, start=36))
            events.append(event(rank, 'recovered', 103.0 + rank, 50 + rank, replayed=4))
        back = found(events, [50, 51], (40, 99.0))
        assert back == Recovery(Tier.WHOLE_JOB, 104.0, 40, 4, 2)

    def test_localized_after_the_whole_job_was_started_again_is_whole_job(self) -> None:
        tier = event(0, 'next_tier', 100.5, reason='', tier='the whole job')
        back = found([*self.SURVIVORS, *self.NEWCOMER, tier], [10, 11, 99], (40, 99.9))
        assert back.tier is Tier.WHOLE_JOB

    def test_from_the_start(self) -> None:
        events = [event(rank, 'worker_started', 101.0, 50 + rank) for rank in range(2)]
        assert found(events, [50, 51], (40, 99.0)) is None
        back = found(events, [50, 51], (40, 99.0), (1, 103.0), (2, 103.5))
        assert back == Recovery(Tier.DISK, 103.0, 0, 0, 2)

    def test_a_survivor_that_logs_before_it_notices_is_not_back(self) -> None:
        events = [event(1, 'worker_started', 100.4, 51), event(0, 'failure_detected', 100.3)]
        assert found(events, [10, 51], (40, 99.0), (41, 100.5)) is None


class TestLostIterations:
    def test_back_at_the_newest_is_no_loss(self) -> None:
        back = Recovery(Tier.LOCALIZED, 102.0, 40, 4, 1)
        assert lost_iterations(back, logged((39, 99.0), (40, 99.9), (41, 102.5))) == 0

    def test_trained_again(self) -> None:
        back = Recovery(Tier.DISK, 103.0, 0, 0, 4)
        assert lost_iterations(back, logged((39, 99.0), (40, 99.9), (1, 103.0))) == 40

    def test_logged_between_strike_and_recovery(self) -> None:
        back = Recovery(Tier.WHOLE_JOB, 103.0, 40, 4, 4)
        assert lost_iterations(back, logged((40, 99.0), (41, 100.1), (42, 104.0))) == 1


def test_persisted_on_all_ranks() -> None:
    events = [event(0, 'window_persisted', 101.0), event(1, 'window_persisted', 99.0)]
    assert not persisted(events, [10, 11], 100.0)
    assert persisted([*events, event(1, 'window_persisted', 101.0)], [10, 11], 100.0)
    assert not persisted([], [], 100.0)


@pytest.mark.parametrize(
    ('text', 'ranks', 'flag'),
    [
        ('pp2-ep2', 4, '--expert-model-parallel-size 2'),
        ('pp4', 4, '--pipeline-model-parallel-size 4'),
        ('pp2-dp2', 4, '--expert-model-parallel-size 1'),
        ('pp2-vp2', 2, '--num-layers-per-virtual-pipeline-stage 1'),
        ('pp2-tp2', 4, '--tensor-model-parallel-size 2 --sequence-parallel'),
        ('pp3', 3, '--num-layers 6'),
    ],
)
def test_layout(text: str, ranks: int, flag: str) -> None:
    layout = parse_layout(text)
    assert layout.ranks == ranks
    assert flag in ' '.join(layout.flags())


def test_summary() -> None:
    outcomes = [outcome(Tier.LOCALIZED), outcome(Tier.LOCALIZED), outcome(Tier.DISK, lost=7)]
    assert summary(outcomes, identical=False) == (
        'chaos: faults=3 localized=2 whole_job=0 disk=1 lost_iterations=7 bit_identical=false'
    )


@pytest.mark.parametrize(
    ('flags', 'complaint'),
    [
        ('--layout pp2+ep2', '--layout'),
        ('--layout pp2-ep2-dp3', 'multiple of ep'),
        ('--layout pp2-dp3', 'must divide'),
        ('--layout pp0', 'at least 1'),
        ('--nodes 3', 'another number'),
        ('--faults 0', '--faults must be at least 1'),
        ('--window none', '--window none'),
        ('--kinds kill,burn', '--kinds kill,burn'),
        ('--nodes 1 --workers-per-node 4', 'no replica survives'),
    ],
)
def test_wrong_flags_are_named(
    flags: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(flags.split())
    assert complaint in capsys.readouterr().err
