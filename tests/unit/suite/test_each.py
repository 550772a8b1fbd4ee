# SPDX-License-Identifier: Apache-2.0
"""A test of many values names all that it fails for."""

import os

import pytest

from tests.support.each import each

pytest_plugins = ['pytester']


def test_all_that_fail_are_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        from tests.support.each import each

        @each('value', [1, 2, 3, 4])
        def test_odd(value):
            assert value % 2
    """)
    failed = pytester.runpytest().stdout.str()
    assert '[(2,)]' in failed and '[(4,)]' in failed and '[(3,)]' not in failed


@each('name, value', [('SET_BY_A_TEST', '1'), ('SET_BY_A_TEST_TOO', '2')])
@each('more', [1, 2])
def test_patches_are_undone_after_each(
    name: str, value: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [one for one in os.environ if one.startswith('SET_BY_A_TEST')]
    monkeypatch.setenv(name, value)
