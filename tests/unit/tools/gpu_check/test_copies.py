# SPDX-License-Identifier: Apache-2.0
"""What has been measured of copies is kept, whatever fails after it."""

import functools
from pathlib import Path

import pytest

from tools.gpu_check import copies, report
from tools.gpu_check.settings import Settings
from tools.gpu_check.stages import run_stage

pytestmark = pytest.mark.thorough


def test_figures_of_the_probe_survive_a_later_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first probe measures a CPU, the second has no directory."""
    probe = copies._probe

    def on_the_cpu(settings: Settings, connections: str, target: Path) -> dict[str, object]:
        memory = tmp_path if connections == '1' else tmp_path / 'missing'
        return probe(settings._replace(memory=memory), connections, target)

    monkeypatch.setattr(copies, '_probe', on_the_cpu)
    parts = run_stage('copies', Settings(tmp_path / 'output', tmp_path, gpu=False))
    found = functools.reduce(report.Findings.and_then, parts)
    assert found.figures['registered_gb_s_1'] > 0
    assert found.figures['connections_1']['small_copy']['beside']['p99_ms'] > 0
    assert 'busy_over_limit_8' not in found.figures
    (no_directory,) = found.problems
    assert no_directory.startswith('the figures with connections=8 are missing: the copy probe')
    assert 'FileNotFoundError' in no_directory
    result = report.StageResult(not found.problems, 1.0, found.figures, found.problems)
    verdict, problem = result.lines('copies')
    assert verdict.startswith('FAIL copies (1 s) pinned_gb_s_1=')
    assert problem.strip() == no_directory
    assert 'FileNotFoundError' in capfd.readouterr().err
