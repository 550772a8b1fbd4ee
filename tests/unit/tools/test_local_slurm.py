# SPDX-License-Identifier: Apache-2.0
"""What the tool refuses; clusters that it starts are those of tests/cluster."""

from pathlib import Path

import pytest

from tools import local_slurm
from tools.local_slurm import main

pytestmark = pytest.mark.timed


@pytest.mark.parametrize(
    ('user', 'programs', 'there', 'message'),
    [
        (1000, True, False, 'needs root'),
        (0, False, False, 'apt-get install slurm-wlm munge'),
        (0, True, True, 'has a cluster already'),
    ],
)
def test_start_names_missing_programs(
    user: int,
    programs: bool,
    there: bool,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(local_slurm.os, 'geteuid', lambda: user)
    monkeypatch.setattr(local_slurm.shutil, 'which', lambda name: name if programs else None)
    if there:
        (tmp_path / 'slurm.conf').touch()
    assert main(['start', str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
