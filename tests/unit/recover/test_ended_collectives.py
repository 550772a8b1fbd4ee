# SPDX-License-Identifier: Apache-2.0
"""Collectives that a failure ends without an error, as NCCL's: no state from them is whole."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.membership.rendezvous import RoundEnded
from moevement_ext.membership.report import NOWHERE, Report
from moevement_ext.memory.window.name import TRIES, RankIdentity, Window, WindowName
from moevement_ext.recover import localized
from moevement_ext.recover.localized import LocalizedRecovery
from moevement_ext.recover.outage import Phases
from moevement_ext.recover.rank_state import RankState
from moevement_ext.recover.stage_replay import SourceLost
from moevement_ext.recover.trainer import Start
from moevement_ext.recover.verdict import Localized


class AbortedOnTheDevice:
    """A membership whose round ends while the GPU carries out what is queued."""

    broken = waits_returned = False
    reports: Sequence[Report] = ()
    store = SimpleNamespace(get=lambda key: b's', set=lambda key, value: None)

    def __init__(self) -> None:
        self.not_updating = threading.Event()

    def synchronize(self) -> None:
        self.broken = self.waits_returned = True


def recovery_of(position: RankState, membership: Any = None, number: int = 1) -> Any:
    config = SparseCheckpointConfig(dir='/nowhere')
    rank = Mock(number=number, world_size=2, config=config, run_id='run')
    rank.identity = RankIdentity('run', 'pp1', number)
    membership = membership or AbortedOnTheDevice()
    return LocalizedRecovery(rank, membership, MagicMock(), MagicMock(), position)


def running_after(iteration: int) -> RankState:
    position = RankState(iteration, Start(iteration, b''))
    position.begins(Start(iteration, b''))
    return position


def test_update_does_not_begin_after_an_aborted_reduction() -> None:
    """Else survivors would update with any bytes as the norm."""
    position = running_after(9)
    with pytest.raises(RoundEnded):
        recovery_of(position).updating()
    assert position.clean_at == 9


def test_update_that_has_begun_is_completed() -> None:
    """All gradients were reduced before the first optimizer wrote: the others do not wait."""
    position, membership = running_after(9), AbortedOnTheDevice()
    position.updating()
    recovery_of(position, membership).updating()
    assert position.torn and not membership.broken
    position.stepped(Start(10, b''))
    assert not position.torn and position.clean_at == 10


COPIED = Localized(target=9, replacements=frozenset({1}), copies={1: 0})


def test_state_of_an_aborted_copy_is_not_whole() -> None:
    recovery = recovery_of(RankState(NOWHERE))
    recovery._protection.planner.replicas = [[1], [0]]
    recovery._position.decided(COPIED, 1)
    with pytest.raises(RoundEnded):
        recovery._copy(COPIED)
    assert recovery._position.clean_at == NOWHERE


def test_state_of_an_aborted_conversion_is_not_whole() -> None:
    recovery = recovery_of(RankState(9))
    with pytest.raises(RoundEnded):
        recovery.converted(Start(9, b''))
    assert recovery._position.clean_at == NOWHERE


def test_state_of_a_stage_with_an_aborted_conversion_is_not_whole() -> None:
    recovery = recovery_of(RankState(9))
    conversion, position = MagicMock(), MagicMock()
    conversion.window = WindowName(7, 'plan')
    with pytest.raises(RoundEnded):
        recovery._replay._replay(
            conversion, MagicMock(together=True), lambda iteration: None, position, Phases()
        )
    conversion.run.assert_called_once()
    position.reached.assert_not_called()


def test_deaths_of_sources_refuse_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only processes that live and do not answer count."""
    reports = [Report(False, 'node', 1, []), Report(True, 'node', 2, [])]
    membership = AbortedOnTheDevice()
    membership.reports = reports
    recovery = recovery_of(RankState(9), membership)
    window = Window(WindowName(7, 'plan'), 3)
    verdict = Localized(target=9, ranks=frozenset({1}), replacements=frozenset({0}), window=window)
    recovery._replay.run = Mock(side_effect=SourceLost('the neighbour died'))
    monkeypatch.setattr(localized, 'decide_recovery', lambda *given, **layout: verdict)
    for _ in range(2 * TRIES):
        with pytest.raises(RoundEnded):
            recovery._replay_window(verdict, lambda iteration: None)
        assert not recovery._refused
        recovery._decide()
