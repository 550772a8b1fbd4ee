# SPDX-License-Identifier: Apache-2.0
"""One test for many values of one kind: it goes on to the end, and names all that it fails for."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def each(names: str, values: Iterable[Any]) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize`, within one case. Each value has its own patches.

    Args:
        names: of the arguments that take a value, or its parts if they are several.
        values: that the test is called with, one after the other.
    """
    taken = [name.strip() for name in names.split(',')]
    rows = [value if len(taken) > 1 else (value,) for value in values]
    assert rows, f'no {names}'

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        given = [one for name, one in signature.parameters.items() if name not in taken]

        @functools.wraps(test)
        def goes_on(**fixtures: Any) -> None:
            failed = []
            for row in rows:
                with pytest.MonkeyPatch.context() as patches:
                    own = {'monkeypatch': patches} if 'monkeypatch' in fixtures else {}
                    try:
                        test(**{**fixtures, **own}, **dict(zip(taken, row, strict=True)))
                    except Exception as error:
                        failed.append((row, error))
            if failed:
                shown = '\n'.join(
                    f'{row}: {type(error).__name__}: {error}' for row, error in failed
                )
                raise AssertionError(f'{len(failed)} of {len(rows)}:\n{shown}') from failed[0][1]

        goes_on.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]
        return goes_on

    return decorate
