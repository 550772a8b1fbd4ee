# SPDX-License-Identifier: Apache-2.0
"""Reports of a rank: short, since one store serves all ranks, and of its newest iteration."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.membership.report import encode
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.name import History, RankIdentity
from moevement_ext.plan.replanning import PlanParameters
from moevement_ext.recover.localized import LocalizedRecovery
from moevement_ext.recover.outage import Phases
from moevement_ext.recover.own_report import handovers
from moevement_ext.recover.rank_state import RankState
from moevement_ext.recover.trainer import Start
from moevement_ext.recover.verdict import Localized
from tests.unit.memory.samples import tmpfs_directory

VERSION, ORIGIN = 2**31, 2**40


def recovery(folder: Path, experts: int) -> LocalizedRecovery:
    """Of a rank that has trained, by a plan that goes by the popularity of so many experts."""
    shares = {f'layer1.expert{expert}': 1 / experts for expert in range(experts)}
    memory = SimpleNamespace(
        log=None,
        store=NodeStore(folder, 'run', 'node'),
        addresses=[('127.0.0.1', 1)],
        mark=b'mark',
    )
    return LocalizedRecovery(
        SimpleNamespace(
            number=0,
            identity=RankIdentity('run', 'pp1', 0),
            config=SparseCheckpointConfig(),
            run_id='run',
        ),
        SimpleNamespace(origin=0),
        SimpleNamespace(loop=SimpleNamespace(hand_over=lambda: b'')),
        SimpleNamespace(
            memory=memory,
            checkpointer=SimpleNamespace(
                schedule=PlanParameters(version=VERSION, origin=ORIGIN, window=4, shares=shares),
                history=History(),
            ),
        ),
        RankState(ORIGIN, Start(ORIGIN, b'state')),
    )


@pytest.mark.parametrize('experts', [1, 4096])
def test_a_report_is_no_longer_for_more_experts(experts: int) -> None:
    with tmpfs_directory() as folder:
        report = recovery(folder, experts)._report.now([])
    (handover,) = handovers([report])
    assert (handover.version, handover.origin) == (VERSION, ORIGIN)
    assert len(report.details) < 100
    assert len(encode(report)) < 500


def test_rank_with_a_copied_state_knows_its_iteration() -> None:
    recovery, rank = MagicMock(), SimpleNamespace(number=1, world_size=2, events=MagicMock())
    rank.events.iteration = 0
    recovery._rank, recovery._phases = rank, Phases()
    LocalizedRecovery._resume(
        recovery, Localized(9, frozenset(), frozenset(), frozenset({1}), None, {1: 0})
    )
    assert rank.events.iteration == 9
