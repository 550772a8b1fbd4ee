# SPDX-License-Identifier: Apache-2.0
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moevement_ext.launch.child import FdLoop
from moevement_ext.launch.hosts import SlurmStarter
from moevement_ext.launch.launch_config import LaunchConfig
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.reservation import ReservedPages
from tests.unit.memory.samples import tmpfs_directory
from tests.unit.tools.samples import HARDWARE
from tools.bench import spare_node
from tools.bench.frame import Report
from tools.bench.spare_node import IN_ADVANCE, LATER, Loss
from tools.lab.launch import Launch


def report(different: list[str]) -> Report:
    early, late = Loss(2.0, 0.5, 2**30, 3 * 2**29, []), Loss(3.0, 1.5, 2**30, 0, different)
    return spare_node.summarize(HARDWARE, [{IN_ADVANCE: early, LATER: late}])


def test_report_has_both_variants_and_differences(capsys: pytest.CaptureFixture[str]) -> None:
    spare_node.show(report(['experts']), Console(width=120))
    text = capsys.readouterr().out
    for shown in (IN_ADVANCE, LATER, '2.00', '1.50', '1.00', '0.00', 'Final states: experts.'):
        assert shown in text
    assert not report(['experts']).exact and report([]).exact
    spare_node.show(report([]), Console(width=120))
    assert 'Final states: equal.' in capsys.readouterr().out


@pytest.mark.parametrize('reserves', [True, False])
def test_reserved_memory_is_counted_at_the_loss(
    reserves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[Sequence[int]]] = []
    monkeypatch.setattr(SlurmStarter, 'reserve', lambda *args: asked.append(args[2]))
    monkeypatch.setattr(SlurmStarter, 'lose_node', lambda *args: None)
    config = LaunchConfig(__file__, nodes=2)
    starter = spare_node._Starter(reserves, config, FdLoop(), lambda event: None)
    files = [[1, 2], [2, 2]]
    starter.reserve(tmp_path, files)
    assert starter.kept == 4 and asked == ([files] if reserves else [])
    with tmpfs_directory() as shm:
        ReservedPages(NodeStore(shm, 'run', 'c')).reserve([8192])
        starter.lose_node(0, lambda name: NodeStore(shm, 'run', name))
    assert starter.in_advance == 8192 and starter.lost_at is not None


def test_environment_of_the_job_is_restored_after_it(tmp_path: Path) -> None:
    before = dict(os.environ)
    launch: Any = Launch(tmp_path, [], 2, 1, variables={'MOEVEMENT_TEST_ONLY': 'x'})
    with spare_node._environment(launch):
        assert os.environ['MOEVEMENT_TEST_ONLY'] == 'x'
    assert dict(os.environ) == before
