# SPDX-License-Identifier: Apache-2.0
"""Checks of a description's fields; errors name the field, the rule and the value.

Descriptions check themselves: to make one raises FieldError if a field breaks its rule.
"""

import math
from collections.abc import Callable
from typing import Any


class FieldError(ValueError):
    """A field breaks its rule. `field` is its name, `problem` the remaining message."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f'{field}: {problem}')
        self.field = field
        self.problem = problem


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Check a rule of a field.

    Raises:
        FieldError: `holds` is false; the message has `field`, `value` and `rule`.
    """
    if not holds:
        raise FieldError(field, f'is {value!r}; {rule}')


def positive(field: str, value: float) -> None:
    """Require that `value` is finite and above 0."""
    require(math.isfinite(value) and value > 0, field, value, 'give a number above 0')


def not_negative(field: str, value: float) -> None:
    """Require that `value` is finite and 0 or more."""
    good = math.isfinite(value) and value >= 0
    require(good, field, value, 'give a finite number, 0 or more')


def positive_or_infinite(field: str, value: float) -> None:
    """Require that `value` is above 0; infinity is allowed."""
    require(value > 0, field, value, 'give a number above 0 (inf: never)')


def whole(field: str, value: int, least: int = 1, most: int | None = None) -> None:
    """Require an integer of at least `least` and at most `most` (None: no limit)."""
    good = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(good, field, value, f'give a whole number, {least} or more')
    require(most is None or value <= most, field, value, f'give a whole number up to {most}')


def share(field: str, value: float) -> None:
    """Require that `value` is in [0, 1]."""
    require(0 <= value <= 1, field, value, 'a share; give a number from 0 to 1')


def part(field: str, value: float) -> None:
    """Require that `value` is in (0, 1]."""
    require(0 < value <= 1, field, value, 'give a share above 0, up to 1')


def check(one: object, **kinds: str) -> None:
    """Check fields of `one` by the rules of their kinds; None is unknown, and always allowed.

    Args:
        one: object with the fields.
        kinds: names of fields, separated by spaces, by name of a rule.
    """
    for kind, names in kinds.items():
        for name in names.split():
            value = getattr(one, name)
            if value is not None:
                _RULES[kind](name, value)


def _count(field: str, value: int) -> None:
    whole(field, value, least=0)


_RULES: dict[str, Callable[[str, Any], None]] = {
    'positive': positive, 'not_negative': not_negative, 'share': share, 'whole': whole,
    'positive_or_infinite': positive_or_infinite, 'count': _count, 'part': part,
}  # fmt: skip
