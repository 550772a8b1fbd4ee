# SPDX-License-Identifier: Apache-2.0
"""The check of a GPU, without one: its jobs, over gloo and with tiny models."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.gpu.jobs.conftest import NAME
from tools.lab.launch import ROOT
from tools.lab.precisions import FLAGS

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1500)]


def test_dry_run_completes(tmp_path: Path) -> None:
    """All but the check of four ranks, whose jobs are those of the demo."""
    command = [sys.executable, '-m', 'pytest', 'tests/gpu/jobs', '--cpu', '-p', 'no:cacheprovider']
    command += ['--output', str(tmp_path), '-k', 'not four_rank']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    tests = msgspec.json.decode((tmp_path / NAME).read_bytes())['tests']
    one_rank, nccl = tests['test_one_rank']['figures'], tests['test_nccl']['figures']
    assert (one_rank['came_back'], one_rank['entries_compared'] > 10) == ('whole_job', True)
    assert one_rank['exposed_ms'] > 0
    assert [cycle['cycle'] for cycle in nccl['3 ranks']['cycles']] == [0, 0, 1, 1, 2, 2]
    assert 'PASS test_copies' in done.stdout and 'FAIL' not in done.stdout
    for name in FLAGS.keys() - {'bf16'}:
        precise = tests[f'test_precision[{name}]']['figures']
        assert (precise['came_back'], precise['replayed'] > 0) == ('whole_job', True)
