# SPDX-License-Identifier: Apache-2.0
"""Selection by names on the command line."""

import pytest

from tests.suite.__main__ import main
from tests.suite.selection import ROOT, UnknownName, with_paths

UNIT = ROOT / 'tests' / 'unit'


def test_folder_or_file_is_found_by_its_name() -> None:
    assert with_paths(['recover']) == ['tests/unit/recover']
    assert with_paths(['layout']) == [
        'tests/unit/capture/test_layout.py',
        'tests/unit/tools/plan/test_layout.py',
    ]
    assert with_paths(['rank_state', '-k', 'recover']) == [
        'tests/unit/recover/test_rank_state.py',
        '-k',
        'recover',
    ]


def test_paths_and_cases_are_unchanged() -> None:
    path = 'tests/unit/recover/test_verdict.py'
    assert with_paths([path, f'{path}::test_x']) == [path, f'{path}::test_x']
    assert with_paths(['test_rank_state.py::test_x']) == [
        'tests/unit/recover/test_rank_state.py::test_x'
    ]


def test_options_alone_select_all_tests() -> None:
    assert with_paths(['-k', 'verdict', '-x']) == ['-k', 'verdict', '-x', 'tests']


def test_help_lists_the_flags_of_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(['--help'])
    assert '--shard I/N' in capsys.readouterr().out


def test_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownName, match='recovery_of_nothing'):
        with_paths(['recovery_of_nothing'])
