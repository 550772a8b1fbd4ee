# SPDX-License-Identifier: Apache-2.0
"""The trial that must fail shows something only where it fails at what it is there for.

Over gloo, where nothing stays open: real ranks are killed, and what goes wrong is brought about.
"""

import os
from pathlib import Path

import pytest

from tests.gpu.jobs import nccl
from tools.lab.launch import ROOT

pytestmark = [pytest.mark.thorough, pytest.mark.timed]

PATCH = """
from moevement_ext.regroup import process_groups

def instead(*arguments):
    {body}

process_groups.{name} = instead
"""


def control() -> tuple[str, list[str]]:
    return nccl.control('gloo')


def put_in_place(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, body: str = 'pass'
) -> None:
    """Have all ranks run something else than a part of the product, from their start."""
    (folder / 'sitecustomize.py').write_text(PATCH.format(name=name, body=body))
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(folder), str(ROOT)]))


def test_control_trial_must_fail_to_reconnect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_place(monkeypatch, tmp_path, 'ProcessGroups.renew')
    wrong, problems = control()
    assert (wrong.startswith('rank '), problems) == (True, [])


def test_control_trial_with_reconnected_groups_proves_nothing() -> None:
    shown, (problem,) = control()
    assert (shown, 'but all came back' in problem) == ('shown nothing', True)
