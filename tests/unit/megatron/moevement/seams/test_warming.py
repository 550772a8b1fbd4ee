# SPDX-License-Identifier: Apache-2.0
"""Upstream's fault tolerance is set up only for jobs that ask for it."""

import argparse

import pytest
from megatron.training import argument_utils, ft_integration, global_vars

from megatron.moevement.seams import warming


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    factory = argument_utils.ArgumentGroupFactory
    monkeypatch.setattr(factory, '_get_field_docstrings', factory._get_field_docstrings)
    monkeypatch.setattr(ft_integration, 'setup', ft_integration.setup)
    monkeypatch.setattr(warming, '_installed', False)
    monkeypatch.setattr(warming, '_known', {})
    return monkeypatch


@pytest.mark.parametrize('asked', [False, True])
def test_fault_tolerance_setup_runs_only_if_enabled(
    asked: bool, installed: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    installed.setattr(ft_integration, 'setup', lambda: called.append('setup'))
    installed.setattr(global_vars, '_GLOBAL_ARGS', argparse.Namespace(enable_ft_package=asked))
    warming.install()
    ft_integration.setup()
    assert called == (['setup'] if asked else [])
