# SPDX-License-Identifier: Apache-2.0
"""What has been measured of copies is kept, whatever fails after it."""

from pathlib import Path

import pytest

from tools.gpu_check import copies, report
from tools.gpu_check.settings import Settings
from tools.gpu_check.stages import run_stage

pytestmark = pytest.mark.thorough

NO_DEVICE = (
    'busy_over_limit is missing: tools.bench.gpu_copy ended with exit status 2: '
    'bench_gpu_copy: no CUDA device; run this on a machine with a GPU'
)


def test_figures_of_the_probe_outlive_what_fails_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first probe measures a CPU, the second has no directory, the product has no GPU."""
    probe = copies._probe

    def on_the_cpu(settings: Settings, connections: str, target: Path) -> dict[str, object]:
        memory = tmp_path if connections == '1' else tmp_path / 'missing'
        return probe(settings._replace(memory=memory, gpu=False), connections, target)

    monkeypatch.setattr(copies, '_probe', on_the_cpu)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    parts = run_stage('copies', Settings(tmp_path / 'output', tmp_path, gpu=True))
    found = report.together(parts)
    assert found.figures['registered_gb_s_1'] > 0
    assert found.figures['connections_1']['paced']['small_copy']['p99_ms'] > 0
    assert 'busy_over_limit' not in found.figures
    *_, no_directory, no_device = found.problems
    assert no_directory.startswith('the figures with connections=8 are missing: the copy probe')
    assert 'FileNotFoundError' in no_directory
    assert no_device == NO_DEVICE
    result = report.StageResult(not found.problems, 1.0, found.figures, found.problems)
    verdict, *problems = result.lines('copies')
    assert verdict.startswith('FAIL copies (1 s) pinned_gb_s_1=')
    assert problems[-1].strip() == NO_DEVICE
    assert 'bench_gpu_copy: no CUDA device' in capfd.readouterr().err
