# SPDX-License-Identifier: Apache-2.0
"""The check of a GPU, without one: what it orchestrates, over gloo and with tiny models."""

import functools
from pathlib import Path

import pytest
from msgspec.json import decode

from tools.gpu_check import one_rank
from tools.gpu_check.__main__ import main
from tools.gpu_check.report import NAME, Findings, Report, Settings, StageResult, save

pytestmark = pytest.mark.thorough

HAS_PASSED = StageResult(True, 1.0, {'kept': True}, [])


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_dry_run_completes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All but the stage of four ranks, whose jobs are those of the demo."""
    here = Report.here(gpu=False)
    save(tmp_path, here.with_stage('four-rank', HAS_PASSED).with_stage('tests', HAS_PASSED))
    code = main(['--cpu', '--output', str(tmp_path)])
    printed = capfd.readouterr().out
    assert code == 0, printed
    stages = decode((tmp_path / NAME).read_bytes(), type=Report).stages
    assert stages['four-rank'] == stages['tests'] == HAS_PASSED
    one_rank, nccl = stages['one-rank'].figures, stages['nccl'].figures
    assert (one_rank['came_back'], one_rank['entries_compared'] > 10) == ('whole_job', True)
    assert one_rank['exposed_ms'] > 0
    assert [cycle['cycle'] for cycle in nccl['3 ranks']['cycles']] == [0, 0, 1, 1, 2, 2]
    assert printed.count('PASS') >= 2 * 6 - 2
    assert 'FAIL' not in printed


@pytest.mark.thorough
@pytest.mark.parametrize('name', ['c1', 'c2', 'c3', 'c4', 'c5'])
def test_configuration_stage_runs_on_stand_ins(name: str, tmp_path: Path) -> None:
    parts = one_rank.run_precision(name, Settings(tmp_path, Path('/dev/shm'), gpu=False))
    found = functools.reduce(Findings.and_then, parts)
    assert found.problems == []
    assert (found.figures['came_back'], found.figures['replayed'] > 0) == ('whole_job', True)
