# SPDX-License-Identifier: Apache-2.0
"""Tests see a GPU only in a run of those that are for one: all others train on the CPU."""

import os
from pathlib import Path

import pytest

from tests import conftest

NAME = 'CUDA_VISIBLE_DEVICES'
TESTS = Path(conftest.__file__).parent


def test_test_process_sees_no_device() -> None:
    assert os.environ[NAME] == ''


@pytest.mark.parametrize(
    ('run', 'seen'),
    [
        (['gpu'], '3'),
        (['gpu/test_devices.py::test_x', 'transformer_engine'], '3'),
        (['gpu', 'unit'], ''),
        (['unit/devices/gpu'], ''),
        (['.'], ''),
    ],
)
def test_folders_that_are_run_decide(
    run: list[str], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, '3')
    conftest.hide_devices([f'{TESTS}/{folder}' for folder in run])
    assert os.environ[NAME] == seen
