# SPDX-License-Identifier: Apache-2.0
"""Upstream's repeated or late work is done once and early, with the same result."""

import argparse
import ast
import sys
from typing import Any

import pytest
from megatron.training import argument_utils, arguments, ft_integration, global_vars

from megatron.moevement.seams import warming


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Restore upstream afterwards."""
    factory = argument_utils.ArgumentGroupFactory
    monkeypatch.setattr(factory, '_get_field_docstrings', factory._get_field_docstrings)
    monkeypatch.setattr(ft_integration, 'setup', ft_integration.setup)
    monkeypatch.setattr(warming, '_installed', False)
    monkeypatch.setattr(warming, '_known', {})
    return monkeypatch


def flags_of(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    return [
        {name: repr(value) for name, value in vars(action).items() if name != 'container'}
        for action in parser._actions
    ]


def parser() -> argparse.ArgumentParser:
    return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def test_sources_are_parsed_once_and_flags_equal_upstreams(
    installed: pytest.MonkeyPatch,
) -> None:
    plain = parser()
    warming.warm_up()
    read: list[object] = []
    parse = ast.parse
    installed.setattr(ast, 'parse', lambda *args, **kw: read.append(args) or parse(*args, **kw))
    again = parser()
    assert not read
    without_addresses = [
        [{**flag, 'type': '', 'default': ''} for flag in flags_of(one)] for one in (plain, again)
    ]
    assert without_addresses[0] == without_addresses[1]


def test_warm_up_imports_the_late_modules(installed: pytest.MonkeyPatch) -> None:
    warming.warm_up()
    assert set(warming._IMPORTED_LATE) <= sys.modules.keys()


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
