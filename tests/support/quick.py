# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a test the default run takes."""

from collections.abc import Iterable

import pytest


def with_quick(cases: Iterable[object], *quick: object) -> list[object]:
    """Parameters: all cases, of which only some run without `--thorough`."""
    known = list(cases)
    assert all(case in known for case in quick)
    thorough = pytest.mark.thorough
    return [case if case in quick else pytest.param(case, marks=thorough) for case in known]
