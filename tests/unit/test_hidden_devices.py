# SPDX-License-Identifier: Apache-2.0
"""Tests see a GPU only in a run of those that are for one: all others train on the CPU."""

import os
from types import SimpleNamespace

import pytest

from tests import conftest

NAME = 'CUDA_VISIBLE_DEVICES'


def test_this_one_sees_none() -> None:
    assert os.environ[NAME] == ''


@pytest.mark.parametrize(
    ('run', 'seen'),
    [
        (['tests/gpu'], '3'),
        (['tests/gpu/test_devices.py::test_x', 'tests/transformer_engine'], '3'),
        (['tests/gpu', 'tests/unit'], ''),
        (['tests'], ''),
    ],
)
def test_folders_that_are_run_decide(
    run: list[str], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, '3')
    conftest.pytest_configure(SimpleNamespace(args=run))
    assert os.environ[NAME] == seen
