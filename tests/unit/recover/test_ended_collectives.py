# SPDX-License-Identifier: Apache-2.0
"""Collectives that a failure ends without an error, as NCCL's: no state from them is whole."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed import DistNetworkError

from moevement_ext.job import ending
from moevement_ext.job.job import Job
from moevement_ext.membership.rendezvous import RoundEnded
from moevement_ext.membership.report import NOWHERE, Report
from moevement_ext.memory.window.directory import TRIES
from moevement_ext.memory.window.name import Window, WindowName
from moevement_ext.recover.localized import LocalizedRecovery
from moevement_ext.recover.outage import Phases
from moevement_ext.recover.rank_state import RankState
from moevement_ext.recover.stage_replay import SourceLost, StageReplay
from moevement_ext.recover.trainer import Start
from moevement_ext.recover.verdict import Localized
from moevement_ext.system import leaving


class AbortedOnTheDevice:
    """A membership whose round ends while the GPU carries out what is queued."""

    broken = waits_returned = False
    not_updating: threading.Event
    store = SimpleNamespace(get=lambda key: b's', set=lambda key, value: None)

    def synchronize(self) -> None:
        self.broken = self.waits_returned = True


def recovery_of(**parts: object) -> Any:
    recovery = object.__new__(LocalizedRecovery)
    vars(recovery).update(parts)
    return recovery


def test_update_does_not_begin_after_an_aborted_reduction() -> None:
    """Else survivors would update with any bytes as the norm."""
    position = RankState(9, Start(9, b''))
    position.begins(Start(9, b''))
    recovery = recovery_of(_membership=AbortedOnTheDevice(), _position=position)
    with pytest.raises(RoundEnded):
        recovery.updating()
    assert position.clean_at == 9


def test_update_that_has_begun_is_completed() -> None:
    position = RankState(9, Start(9, b''))
    position.begins(Start(9, b''))
    position.updating()
    membership = AbortedOnTheDevice()
    membership.not_updating = threading.Event()
    recovery = recovery_of(_membership=membership, _position=position)
    recovery.updating()
    assert position.torn and not membership.broken
    position.stepped(Start(10, b''))
    assert not position.torn and position.clean_at == 10


def test_iteration_does_not_begin_in_a_round_that_has_ended() -> None:
    """Else it would count as one that can be rolled back to."""
    membership = SimpleNamespace(broken=True)
    position = RankState(9, Start(9, b''))
    recovery = recovery_of(_membership=membership, _position=position)
    before = position.position
    with pytest.raises(RoundEnded):
        recovery.begin(Start(9, b''))
    assert position.position is before


def test_state_of_an_aborted_copy_is_not_whole() -> None:
    protection = MagicMock()
    protection.planner.replicas = [[1], [0]]
    recovery = recovery_of(
        _rank=SimpleNamespace(number=1), _membership=AbortedOnTheDevice(), _trainer=MagicMock(),
        _protection=protection, _phases=Phases(), _position=RankState(NOWHERE),
    )  # fmt: skip
    verdict = Localized(9, frozenset(), frozenset(), frozenset({1}), None, {1: 0})
    recovery._position.decided(verdict, 1)
    with pytest.raises(RoundEnded):
        recovery._copy(verdict)
    assert recovery._position.clean_at == NOWHERE


def test_state_of_an_aborted_conversion_is_not_whole() -> None:
    recovery = recovery_of(_membership=AbortedOnTheDevice(), _position=RankState(9))
    with pytest.raises(RoundEnded):
        recovery.converted(Start(9, b''))
    assert recovery._position.clean_at == NOWHERE


def test_state_of_a_stage_with_an_aborted_conversion_is_not_whole() -> None:
    def broken() -> NoReturn:
        raise RoundEnded('another rank is gone')

    rank = SimpleNamespace(config=SimpleNamespace(lossy=False))
    replay = StageReplay(rank, MagicMock(), MagicMock(), lambda phase: None, broken)  # type: ignore[arg-type]
    conversion, position = MagicMock(), MagicMock()
    conversion.window = WindowName(7, 'plan')
    with pytest.raises(RoundEnded):
        replay._replay(
            conversion, MagicMock(together=True), lambda iteration: None, position, Phases()
        )
    conversion.run.assert_called_once()
    position.reached.assert_not_called()


@pytest.mark.parametrize('lost', [RoundEnded('rank 0 was killed'), DistNetworkError('Broken pipe')])
def test_windows_stay_if_the_last_barrier_was_ended(
    lost: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turned_away(name: str) -> NoReturn:
        raise lost

    job: Any = object.__new__(Job)
    closed: list[bool] = []
    job.keeps_windows, job.rank = False, SimpleNamespace(number=1)
    job.membership = SimpleNamespace(barrier=turned_away)
    job._stop, job.close = lambda: None, lambda remove: closed.append(remove)
    acts: list[Callable[[int], None]] = []
    monkeypatch.setattr(leaving, 'last_acts', acts)
    monkeypatch.setattr(torch.distributed, 'barrier', lambda: None)
    monkeypatch.setattr(ending, 'LastBarrier', MagicMock())
    monkeypatch.setattr(ending, 'write_trained', lambda store: None)
    with pytest.raises(RoundEnded) if isinstance(lost, RoundEnded) else nullcontext():
        job._finish()
    for act in acts:
        act(0)
    assert not closed and len(acts) == isinstance(lost, DistNetworkError)


def test_deaths_of_sources_refuse_no_window() -> None:
    class Lost:
        def run(self, *_: object) -> NoReturn:
            raise SourceLost('the neighbour died')

    reports = [Report(False, 'node', 1, []), Report(True, 'node', 2, [])]
    recovery = recovery_of(
        _refused=[], _lost_sources=0, _position=None, _phases=None, _replay=Lost(),
        _fruitless=SimpleNamespace(progressed=lambda: None, met=lambda reports, found: found),
        _follows_from=lambda reports: verdict, _membership=SimpleNamespace(reports=reports),
        _protection=MagicMock(),
    )  # fmt: skip
    window = Window(WindowName(7, 'plan'), 3)
    verdict = Localized(9, frozenset({1}), frozenset({1}), frozenset({0}), window)
    for _ in range(2 * TRIES):
        with pytest.raises(RoundEnded):
            recovery._replay_window(verdict, lambda iteration: None)
        assert not recovery._refused
        recovery._decide()
