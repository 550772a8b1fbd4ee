# SPDX-License-Identifier: Apache-2.0
"""What a drill leaves in host memory: nothing, on any node."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import drill
from tools.lab.errors import LabError
from tools.lab.trainer_flags import value_of

SRUN = """\
#!/usr/bin/env bash
while [[ $1 == --* ]]; do echo "$1" >>"$0.asked"; shift; done
exec "$@"
"""
"""Runs the command of a step here."""


def left_by(run_id: str, root: Path) -> Path:
    """Window of one layout, and the directory of a metrics port."""
    window = root / f'{run_id}.0a1b2c3d' / 'node0' / '0' / '0' / 'window-4-plan.window'
    for path in (window, root / '.metrics' / run_id / 'rank0'):
        path.parent.mkdir(parents=True)
        path.touch()
    return window


@pytest.mark.parametrize('in_slurm', [False, True])
def test_windows_of_one_run_are_deleted_on_all_nodes(
    in_slurm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / 'host memory'
    left_by('drill-12-disturbed', root)
    other = left_by('run-7', root)
    srun = tmp_path / 'srun'
    srun.write_text(SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    if in_slurm:
        monkeypatch.setenv('SLURM_JOB_NODELIST', 'n[1-2]')
    drill.remove_memory([str(root)], 'drill-12-disturbed')
    assert sorted(path.name for path in root.iterdir()) == ['.metrics', 'run-7.0a1b2c3d']
    assert other.exists() and (root / '.metrics' / 'run-7').exists()
    assert not (root / '.metrics' / 'drill-12-disturbed').exists()
    asked = tmp_path / 'srun.asked'
    assert asked.exists() == in_slurm
    assert not in_slurm or '--ntasks-per-node=1' in asked.read_text().split()


def test_nodes_that_cannot_be_reached_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.setenv('SLURM_JOB_NODELIST', 'n[1-2]')
    with pytest.raises(LabError, match="delete them: srun .* 'rm -rf /dev/shm/m/drill-12"):
        drill.remove_memory(['/dev/shm/m'], 'drill-12-disturbed')


def test_a_job_that_failed_leaves_no_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its run id is drawn: no later launch would use or delete them."""
    left: list[Path] = []

    def fails(command: Sequence[str]) -> int:
        left.append(left_by(value_of(command, '--sparse-ckpt-run-id') or '', tmp_path / 'memory'))
        return 1

    monkeypatch.setattr(drill, '_run', fails)
    own = ['--output', str(tmp_path / 'drill'), '--', '--sparse-ckpt-dir', str(tmp_path / 'memory')]
    assert drill.main(own) == 2
    assert 'the undisturbed job ended with status 1' in capsys.readouterr().out
    assert left and not left[0].exists()
