# SPDX-License-Identifier: Apache-2.0
"""A strategy that copies some experts: all stages go back, and some experts further.

Processes are threads (`threaded_job`), and train a fake; what a recovery loads, loses and trains
again is compared with a recount.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moevement_ext.config import DYNAMIC, MOC
from moevement_ext.events import Recovered, Replanned, TokensLost
from moevement_ext.faults import Phase
from moevement_ext.memory.window.name import WindowName
from moevement_ext.plan.replanning import Cycle
from moevement_ext.plan.strategy import moc
from moevement_ext.protect.disk_tier import DiskTier
from moevement_ext.protect.expert_ledger import ExpertLedger
from moevement_ext.protect.protection import Protection
from moevement_ext.protect.replanner import Replanner
from tests.unit.recover.fake_groups import FakeGroups
from tests.unit.recover.fake_trainer import FakeOperators, FakeTrainer
from tests.unit.recover.threaded_job import (
    OF_THREADS,
    STAGES,
    Fault,
    Process,
    ThreadedJob,
    spy,
    train,
)
from tests.unit.replicate.peers import wait_for

EXPERTS = 4
INTERVAL = 4
STRUCK = 27
"""Its newest checkpoint is of 24, the seventh, in which the turn is that of expert 2."""
ITERATIONS = 30

pytestmark = [pytest.mark.timed, *OF_THREADS]


class Tokens:
    """Of a layer of experts; a cut-off iteration has counted some already."""

    soft = False

    def __init__(self, names: list[str]) -> None:
        self.counting = False
        self._names = names
        self._counts: dict[str, float] = {}

    def route(self, iteration: int) -> None:
        if self.counting:
            self._counts = dict(zip(self._names, routed_in(iteration), strict=True))

    def take(self) -> dict[str, float]:
        counts, self._counts = self._counts, {}
        return {name: counts.get(name, 0.0) for name in self._names}

    def make_up(self, tokens: Mapping[str, float]) -> None:
        raise AssertionError('not by this strategy')

    def take_capacity(self) -> None:
        return None


def routed_in(iteration: int) -> list[float]:
    """Tokens of each expert of a stage in the iteration after `iteration`."""
    return [float(index + 1 + iteration % 3) for index in range(EXPERTS)]


def routed(index: int, first: int, end: int) -> float:
    return sum(routed_in(iteration)[index] for iteration in range(first, end))


class ExpertTrainer(FakeTrainer):
    def __init__(self, rank: int, groups: FakeGroups) -> None:
        experts = [f'{rank}.layer.expert{index}' for index in range(EXPERTS)]
        super().__init__([*experts, f'{rank}.rest'], rank, STAGES, groups)
        self.operators.kinds |= dict.fromkeys(experts, 'expert')
        self.tokens = Tokens(experts)

    def iterate(self, iteration: int) -> None:
        self.tokens.route(iteration)
        super().iterate(iteration)


class Lived:
    """A job that trained through its faults, and all its events."""

    def __init__(self, job: ThreadedJob) -> None:
        self.job, events = job, job.events
        self.lost = [event for event in events if isinstance(event, TokensLost)]
        self.recovered = [event for event in events if isinstance(event, Recovered)]
        self.replanned = [event for event in events if isinstance(event, Replanned)]


def launch(schedule: list[Fault], restarts: int = 0, **chosen: Any) -> Lived:
    given = {'interval': INTERVAL, 'trainer': ExpertTrainer, **chosen}
    job = train(ITERATIONS, schedule, strategy=MOC, **given)
    assert job.restarts == restarts
    return Lived(job)


def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    masters: dict[str, bytes] = {}

    def keep(operators: FakeOperators, *_: object) -> None:
        masters.update({name: it.numpy().tobytes() for name, it in operators.master.items()})

    spy(monkeypatch, FakeOperators, 'load', keep, after=True)
    return masters


def test_experts_are_of_the_versions_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = launch([], experts=1).job.states
    masters = loaded(monkeypatch)
    lived = launch([Fault(1, Phase.FORWARD, STRUCK)], experts=1)
    versions = [16, 20, 24, 12]
    assert len(lived.lost) == STAGES
    for event in lived.lost:
        assert event.start == 24
        assert [*event.versions.values()] == versions
        gone = sum(routed(index, version, 24) for index, version in enumerate(versions))
        assert event.tokens == event.lost == gone
        all_tokens = sum(routed(index, 0, 24) for index in range(EXPERTS)) / 24 * ITERATIONS
        assert event.share == pytest.approx(gone / all_tokens)
        rank = int(next(iter(event.versions)).partition('.')[0])
        for name, version in [*event.versions.items(), (f'{rank}.rest', 24)]:
            states, *_ = before[rank, version]
            assert masters[name] == states[name], f'{name} is not of version {version}'
    assert {event.scope for event in lived.recovered} == {'global'}
    last = [event for event in lived.recovered if event.replayed]
    assert any('loss' in name for event in last for name in event.differing), 'it is shown'


def test_a_second_failure_is_counted_from_the_first() -> None:
    faults = [Fault(1, Phase.FORWARD, 19), Fault(0, Phase.FORWARD, STRUCK, node_lost=True)]
    lived = launch(faults, experts=1)
    first, second = ([event for event in lived.lost if event.start == start] for start in (16, 24))
    assert len(first) == len(second) == STAGES
    for before, after in zip(first, second, strict=True):
        assert [*before.versions.values()] == [16, 4, 8, 12]
        assert before.tokens == sum(
            routed(index, version, 16) for index, version in enumerate([16, 4, 8, 12])
        )
        assert [*after.versions.values()] == [16, 20, 24, 12]
        gone = [routed(0, 16, 24), routed(1, 20, 24), 0, routed(3, 16, 24)]
        assert after.tokens == sum(gone), 'lost in the second failure'
        assert after.lost == before.tokens + after.tokens


def test_a_death_in_the_recovery_loses_no_more() -> None:
    faults = [Fault(1, Phase.FORWARD, STRUCK), Fault(0, Phase.CATCH_UP, STRUCK - 2)]
    lived = launch(faults, experts=1)
    assert len({(event.start, event.tokens, event.lost) for event in lived.lost}) == 1


def test_a_job_that_is_started_again_loses_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    at_once = launch([Fault(1, Phase.FORWARD, STRUCK)], experts=1)
    again = launch([Fault(1, Phase.FORWARD, STRUCK, all_die=True)], restarts=1, experts=1)
    assert losses(again) == losses(at_once)
    total = sum(event.tokens for event in again.lost)
    assert capfd.readouterr().out.count(f'tokens lost: {total:.0f} |') == 2
    states = (it.job.states for it in (at_once, again))
    one, other = ({key: it[key] for key in it if key[1] > STRUCK} for it in states)
    assert one == other, 'and comes to the same bits'


@pytest.mark.parametrize('nodes', [1, STAGES])
def test_memory_is_the_first_level_and_the_disk_the_second(
    nodes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The checkpoint of 16 is on all disks, that of 24 is in memory only.

    If one node loses its memory, its experts come from peers; if all do, from disk, and older.
    """
    offer = DiskTier.persisted
    on_disk: list[WindowName] = []

    def awaited(job: ThreadedJob, rank: int, trainer: FakeTrainer) -> None:
        # A disk that is late skips a window: memory keeps that of 16 until later ones replace it.
        if trainer.iteration == 16 + INTERVAL - 1:
            wait_for(lambda: [name.start for name in on_disk].count(16) >= STAGES)

    def lost(job: ThreadedJob, process: Process) -> None:
        if nodes > 1:
            shutil.rmtree(job.directory / 'run', ignore_errors=True)

    monkeypatch.setattr(
        DiskTier, 'persisted', lambda tier, name: name.start > 16 or offer(tier, name)
    )
    spy(monkeypatch, DiskTier, '_note_complete', lambda _, it: on_disk.append(it), after=True)
    spy(monkeypatch, ThreadedJob, 'note', awaited, after=True)
    spy(monkeypatch, ThreadedJob, '_reap', lost, after=True)
    fault = Fault(1, Phase.FORWARD, STRUCK, all_die=nodes > 1, node_lost=nodes == 1)
    lived = launch([fault], restarts=int(nodes > 1), experts=1, disk=str(tmp_path), disk_every=4)
    start, versions = (24, [16, 20, 24, 12]) if nodes == 1 else (16, [16, 4, 8, 12])
    gone = sum(routed(index, version, start) for index, version in enumerate(versions))
    assert {(event.start, *event.versions.values()) for event in lived.lost} == {(start, *versions)}
    assert {event.tokens for event in lived.lost} == {gone}
    said = capfd.readouterr().out
    assert f'tokens lost: {STAGES * gone:.0f} |' in said
    assert said.count('strategy moc is lossy') == 1 + int(nodes > 1), 'at each start of the job'


def losses(lived: Lived) -> list[Any]:
    return sorted((it.start, [*it.versions.items()], it.tokens, it.share) for it in lived.lost)


def test_too_great_a_loss_doubles_the_experts() -> None:
    faults = [Fault(1, Phase.FORWARD, 11)]
    announced: list[bool] = []
    adopted: list[int] = []

    def awaited(job: ThreadedJob, rank: int, trainer: FakeTrainer) -> None:
        # Other ranks follow rank 0 when a later checkpoint ends. It decides by one of which all
        # have told their load, unless the next one is over by then: these iterations take no time.
        if trainer.iteration == ITERATIONS - 1 - INTERVAL:
            wait_for(lambda: any(announced))
        if trainer.iteration == ITERATIONS - 1:
            wait_for(lambda: len(adopted) >= STAGES)

    def leads(replanner: Replanner, start: int) -> None:
        announced.append(replanner._store.check(['plan/newest']))

    def adopts(rank: Protection, plan: Cycle) -> None:
        adopted.append(plan.experts)

    with pytest.MonkeyPatch.context() as waiting:
        spy(waiting, ThreadedJob, 'note', awaited, after=True)
        spy(waiting, Protection, '_adopt', adopts, after=True)
        spy(waiting, Replanner, '_lead', leads, after=True)
        waiting.setattr(moc, 'LOST_SHARE', 0.05)
        lived = launch(faults, experts=DYNAMIC)
    assert max(event.share for event in lived.lost) > 0.05
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moc, 'LOST_SHARE', 0.9)
        kept = launch(faults, experts=DYNAMIC)
    assert max(event.share for event in kept.lost) < 0.9
    assert set(adopted) == {2}
    assert kept.replanned == []


@pytest.mark.parametrize('forgotten', ['go_back', 'older'])
def test_step_left_out_is_noticed(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go_back = ExpertLedger.go_back

    def not_rewound(ledger: ExpertLedger, *given: Any) -> TokensLost:
        before = dict(ledger._routed)
        lost = go_back(ledger, *given)
        ledger._routed = before
        return lost

    if forgotten == 'go_back':
        monkeypatch.setattr(ExpertLedger, 'go_back', not_rewound)
        with pytest.raises(AssertionError, match='lost in the second failure'):
            test_a_second_failure_is_counted_from_the_first()
    else:
        checkpoint = ExpertLedger.checkpoint

        def newer(*given: Any) -> Any:
            return checkpoint(*given)._replace(older=frozenset())

        monkeypatch.setattr(ExpertLedger, 'checkpoint', newer)
        with pytest.raises(AssertionError, match='is not of version'):
            test_experts_are_of_the_versions_that_are_named(monkeypatch)
