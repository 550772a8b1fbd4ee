# SPDX-License-Identifier: Apache-2.0
"""Selection by names on the command line."""

import pytest

from tests.suite.selection import UnknownName, with_paths


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


def test_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownName, match='recovery_of_nothing'):
        with_paths(['recovery_of_nothing'])
