# SPDX-License-Identifier: Apache-2.0
"""Localized and whole-job recovery of a small pipeline, for any lost rank at any point.

Recovery, membership, host memory and its servers are real; processes are threads (see
`threaded_job`), and train a fake. Every iteration is compared with a fault-free run, bit for bit.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import pytest

from moevement_ext.faults import Phase
from moevement_ext.membership.membership import Membership
from moevement_ext.memory.budget import Logged
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.window.name import WindowName
from moevement_ext.protect.lifecycle import WindowLifecycle
from moevement_ext.protect.protection import Protection
from moevement_ext.recover.localized import LocalizedRecovery
from moevement_ext.recover.stage_replay import StageReplay
from moevement_ext.recover.verification import Verification
from moevement_ext.replicate.host_memory import HostMemory
from tests.support.quick import with_quick
from tests.unit.recover.fake_trainer import FakeLoop, FakeOperators, FakePipeline, FakeState
from tests.unit.recover.threaded_job import (
    OF_THREADS,
    STAGES,
    WINDOW,
    Expected,
    Fault,
    ThreadedJob,
    install,
    spy,
    train,
)

OF_AN_ITERATION = [
    *(Phase.FORWARD, Phase.P2P, Phase.OPTIMIZER, Phase.NORM, Phase.STEP, Phase.AFTER_STEP),
    *(Phase.EVALUATE, Phase.EVALUATED),
]
OF_A_SLOT = [
    *WINDOW * (Phase.CAPTURE,),  # in one slot after the other, as `DISTANCE` is W + 1
    *WINDOW * (Phase.SEAL,),
    *WINDOW * (Phase.REPLICATE,),
]
OF_A_REPLAY = [Phase.FETCH, Phase.LOAD, Phase.CONVERT, Phase.CATCH_UP]
OF_ANY_RANK = [Phase.REPLAYED, Phase.REGROUP, Phase.CONNECT, Phase.RESUME]

FIRST = 2 * WINDOW + 1
"""An iteration before which a window is persisted, and some are committed after its last slot."""
DISTANCE = WINDOW + 1
ITERATIONS = FIRST + 2 * WINDOW * len(OF_A_REPLAY + OF_ANY_RANK)
"""The longest of these runs has no more."""

VICTIMS = with_quick(range(STAGES), 1)

MOST_LEFT_OPEN = 500
"""Descriptors, by processes that are killed in their first rendezvous, or while they close."""

pytestmark = [pytest.mark.timed, *OF_THREADS]


@pytest.fixture(scope='module')
def threads_are_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
        before = psutil.Process().num_fds()
        yield
    gc.collect()  # processes are cycles of objects
    assert psutil.Process().num_fds() - before < MOST_LEFT_OPEN


def train_through(schedule: Sequence[Fault], expected: Expected) -> ThreadedJob:
    """Localized recoveries only, after which each iteration was evaluated once on each rank."""
    iterations = max(fault.iteration for fault in schedule) + WINDOW + 1
    job = train(iterations, schedule, expected)
    assert job.restarts == 0
    assert job.evaluations == STAGES * [iterations], 'not evaluated once'
    assert {event.scope for event in job.recovered} == {'localized'}
    assert not any(event.differing for event in job.recovered)
    assert len(job.histories) == 1, 'windows of the survivors are of no use'
    return job


@pytest.mark.parametrize('victim', VICTIMS)
def test_job_survives_a_lost_rank_at_any_point_of_an_iteration(
    victim: int, fault_free: Expected
) -> None:
    die_one_after_the_other(victim, OF_AN_ITERATION, fault_free)


@pytest.mark.parametrize('victim', VICTIMS)
def test_job_survives_a_lost_rank_while_any_slot_is_kept(victim: int, fault_free: Expected) -> None:
    die_one_after_the_other(victim, OF_A_SLOT, fault_free)


def test_windows_without_replica_count_again(fault_free: Expected, withdrawn: list[int]) -> None:
    """Otherwise a window is persisted, and the one before is overwritten, without its copy."""
    train_through([Fault(1, Phase.FORWARD, FIRST)], fault_free)
    assert len(withdrawn) == 1 and withdrawn != [1]


def test_same_address_gets_windows(fault_free: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, 'peer_addresses', lambda memory: [('the same', 1)])
    offered: list[object] = []
    spy(monkeypatch, WindowLifecycle, 'change_peers', lambda *given: offered.append(given))
    train_through([Fault(1, Phase.FORWARD, FIRST)], fault_free)
    assert len(offered) == 1


def die_one_after_the_other(victim: int, phases: Sequence[Phase], expected: Expected) -> None:
    schedule = [Fault(victim, phase, FIRST + DISTANCE * n) for n, phase in enumerate(phases)]
    job = train_through(schedule, expected)
    assert len(job.recovered) == STAGES * len(schedule)


@pytest.mark.parametrize('victim', VICTIMS)
def test_job_survives_a_lost_replacement_at_any_point_of_the_recovery(
    victim: int, fault_free: Expected
) -> None:
    schedule = []
    for n, phase in enumerate(OF_A_REPLAY + OF_ANY_RANK):
        schedule.append(Fault(victim, Phase.FORWARD, FIRST + 2 * WINDOW * n, node_lost=n % 2 == 1))
        schedule.append(Fault(victim, phase))
    train_through(schedule, fault_free)


@pytest.mark.parametrize('victim', VICTIMS)
def test_job_survives_another_loss_in_a_recovery(victim: int, fault_free: Expected) -> None:
    schedule = []
    for n, phase in enumerate([Phase.DETECT, *OF_ANY_RANK]):
        schedule.append(Fault(victim, Phase.FORWARD, FIRST + 2 * WINDOW * n))
        schedule.append(Fault((victim + 1) % STAGES, phase))
    train_through(schedule, fault_free)


def test_loss_of_all_ranks_at_any_point_is_recovered_from_memory(fault_free: Expected) -> None:
    phases = [
        *(Phase.FORWARD, Phase.LOAD, Phase.STEP, Phase.CONVERT, Phase.AFTER_STEP, Phase.EVALUATE),
        *(Phase.SEAL, Phase.SEAL, Phase.REPLICATE, Phase.REPLICATE),
    ]
    schedule = [
        Fault(
            n % STAGES,
            phase,
            iteration=0 if phase in OF_A_REPLAY else FIRST + DISTANCE * n,
            all_die=True,
            node_lost=n % 2 == 1,
        )
        for n, phase in enumerate(phases)
    ]
    job = train(FIRST + DISTANCE * len(phases) + WINDOW, schedule, fault_free)
    assert job.restarts == len(schedule)
    assert job.recovered and not any(event.differing for event in job.recovered)


def first_and_middle_stage_are_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one of them goes back, so does the other, which has a log already."""

    def tied(operators: FakeOperators) -> tuple[str, ...]:
        return tuple(name for name in operators.names[:1] if name[0] in '01')

    monkeypatch.setattr(FakeOperators, 'tied', property(tied))


def log_of_the_middle_stage_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds three of the iterations since the window before the newest."""
    make = FakePipeline.__init__

    def make_short(pipeline: FakePipeline, stage: int, *args: Any) -> None:
        make(pipeline, stage, *args)
        if stage == 1:
            record_bytes = pipeline.logged.record_bytes
            pipeline.logged = Logged(record_bytes, record_bytes)

    monkeypatch.setattr(FakePipeline, '__init__', make_short)


def test_neighbours_wait_for_new_sends(
    fault_free: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_and_middle_stage_are_tied(monkeypatch)
    log_of_the_middle_stage_is_short(monkeypatch)
    done: dict[int, list[str]] = {rank: [] for rank in range(STAGES)}
    lacking = set[int]()

    def rewinds(protection: Protection, iteration: int) -> None:
        log, rank = protection.memory.log, protection._rank.number
        done[rank].append('rewind')
        if log is not None and (log.first_iteration or 0) > iteration + 1:
            lacking.add(rank)

    def withdraws(protection: Protection, window: WindowName) -> None:
        done[protection._rank.number].append('withdraw')

    spy(monkeypatch, Protection, 'rewind_log', rewinds)
    spy(monkeypatch, Protection, 'withdraw_after', withdraws)
    spy(monkeypatch, Membership, 'barrier', lambda it, name: done[it._rendezvous.rank].append(name))
    train_through([Fault(0, Phase.FORWARD, FIRST + 2)], fault_free)
    assert 1 in lacking
    for rank in (0, 1):
        assert done[rank][: done[rank].index('replayed')] == ['rewind', 'withdraw', 'ready']


def nothing_roll_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def roll_back(recovery: LocalizedRecovery) -> None:
        recovery._position.undone()

    monkeypatch.setattr(LocalizedRecovery, '_roll_back', roll_back)


def recorded_norm_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = StageReplay._entry

    def another(replay: StageReplay, iteration: int) -> LedgerEntry:
        found = entry(replay, iteration)
        return LedgerEntry(iteration, [found.grad_norms[0] + 1.0], [], 2, found.consumed_samples)

    monkeypatch.setattr(StageReplay, '_entry', another)


def auxiliary_state_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeState, 'restore', FakeState.set_counters)


def post_step_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLoop, 'finish_post_step', lambda *_: True)


@pytest.mark.parametrize(
    ('breaking', 'phase', 'noticed'),
    [
        (nothing_roll_back, Phase.P2P, 'differing: rank'),
        (recorded_norm_is_another, Phase.FORWARD, 'differing: rank'),
        (auxiliary_state_not_restored, Phase.FORWARD, 'differing: rank'),
        (post_step_not_finished, Phase.EVALUATE, 'not evaluated once'),
    ],
)
def test_recovery_without_a_step_changes_a_bit(
    breaking: Callable[[pytest.MonkeyPatch], None],
    phase: Phase,
    noticed: str,
    fault_free: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    breaking(monkeypatch)
    with pytest.raises(AssertionError, match=noticed):
        train_through([Fault(1, phase, FIRST)], fault_free)


@pytest.mark.parametrize('all_die', [False, True])
def test_late_difference_shows_in_the_loss(all_die: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check = Verification._check_state

    def check_and_spoil(verification: Verification, iteration: int) -> None:
        was_last = iteration == max(verification._expected, default=-1)
        check(verification, iteration)
        if was_last:
            read = (key for key in verification._sources if key.part == 'weight')
            verification._sources[min(read)][0] ^= 1

    monkeypatch.setattr(Verification, '_check_state', check_and_spoil)
    job = train(FIRST + WINDOW, [Fault(2, Phase.EVALUATE, FIRST + 1, all_die=all_die)])
    found = {name for event in job.recovered for name in event.differing}
    what = {'loss', 'gradient norm'} if all_die else {'loss'}
    first = (FIRST, FIRST + 1)  # the newest slot may not have been sealed on a busy machine
    assert found in [{f'{one} from iteration {at}' for one in what} for at in first]
