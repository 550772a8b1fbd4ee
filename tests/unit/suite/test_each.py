# SPDX-License-Identifier: Apache-2.0
"""A test of many values names all that it fails for."""

import os

import pytest

from tests.support.each import each


def test_all_that_fail_are_named() -> None:
    seen = []

    @each('value', [1, 2, 3, 4])
    def is_odd(value: int) -> None:
        seen.append(value)
        assert value % 2, 'even'

    with pytest.raises(AssertionError) as failed:
        is_odd()
    assert seen == [1, 2, 3, 4]
    assert '2 of 4' in str(failed.value)
    assert '(2,): AssertionError: even' in str(failed.value)
    assert '(4,)' in str(failed.value) and '(3,)' not in str(failed.value)


def test_no_values_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match='no value'):
        each('value', [])


@each('name, value', [('SET_BY_A_TEST', '1'), ('SET_BY_A_TEST_TOO', '2')])
def test_patches_are_undone_after_each(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [one for one in os.environ if one.startswith('SET_BY_A_TEST')]
    monkeypatch.setenv(name, value)


@each('left', [1, 2])
@each('right', [3, 4])
def test_values_are_combined_with_each_other(left: int, right: int, tmp_path: object) -> None:
    assert left < right and tmp_path
