# SPDX-License-Identifier: Apache-2.0
"""One case for many values of one kind; pytest's subtests name all that it fails for."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def each(names: str, values: Iterable[Any]) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize`, within one case. Each value has its own patches."""
    taken = [name.strip() for name in names.split(',')]
    rows = [value if len(taken) > 1 else (value,) for value in values]
    assert rows, f'no {names}'

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        given = {k: one for k, one in signature.parameters.items() if k not in taken}
        subtests = inspect.Parameter('subtests', inspect.Parameter.KEYWORD_ONLY)

        @functools.wraps(test)
        def goes_on(subtests: pytest.Subtests, **fixtures: Any) -> None:
            fixtures |= {'subtests': subtests} if 'subtests' in given else {}
            for row in rows:
                with subtests.test(str(row)), pytest.MonkeyPatch.context() as patches:
                    own = {'monkeypatch': patches} if 'monkeypatch' in given else {}
                    test(**{**fixtures, **own}, **dict(zip(taken, row, strict=True)))

        parameters = (given | {'subtests': subtests}).values()
        goes_on.__signature__ = signature.replace(parameters=[*parameters])  # type: ignore
        return goes_on

    return decorate
