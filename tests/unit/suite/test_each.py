# SPDX-License-Identifier: Apache-2.0
"""A test of many values names all that it fails for."""

import pytest

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
