# SPDX-License-Identifier: Apache-2.0
"""Checks of a description's fields; errors name the field, the rule and the value.

Descriptions check themselves: their constructors raise FieldError if a field breaks its rule.
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


_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    'positive': (lambda value: 0 < value < math.inf, 'give a number above 0'),
    'positive_or_infinite': (lambda value: value > 0, 'give a number above 0 (inf: never)'),
    'not_negative': (lambda value: 0 <= value < math.inf, 'give a finite number, 0 or more'),
    'share': (lambda value: 0 <= value <= 1, 'a share; give a number from 0 to 1'),
    'part': (lambda value: 0 < value <= 1, 'give a share above 0, up to 1'),
}


def number(field: str, value: Any, kind: str) -> None:
    """Check a number by the rule of its kind: one of `_RULES`, `whole` (1 or more) or `count`."""
    if kind in ('whole', 'count'):
        whole(field, value, least=int(kind == 'whole'))
    else:
        holds, rule = _RULES[kind]
        require(holds(value), field, value, rule)


def whole(field: str, value: int, least: int = 1, most: int | None = None) -> None:
    """Require an integer of at least `least` and at most `most` (None: no limit)."""
    good = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(good, field, value, f'give a whole number, {least} or more')
    require(most is None or value <= most, field, value, f'give a whole number up to {most}')


def check(one: object, **kinds: str) -> None:
    """Check fields of `one` by the rules of their kinds; None is unknown, and always allowed.

    Args:
        one: object with the fields.
        kinds: names of fields, separated by spaces, by kind as for `number`.
    """
    for kind, names in kinds.items():
        for name in names.split():
            value = getattr(one, name)
            if value is not None:
                number(name, value, kind)
