# SPDX-License-Identifier: Apache-2.0
"""Rules of fields, as types; errors carry the field, the rule and the value.

A type says the rule of a field to msgspec, which reads descriptions, and to `check`, which
constructors call.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import UNSET, Meta, Struct

_MOST = math.nextafter(math.inf, 0)
Positive = Annotated[float, Meta(gt=0, le=_MOST, description='give a number above 0')]
PositiveOrInfinite = Annotated[float, Meta(gt=0, description='give a number above 0 (inf: never)')]
NotNegative = Annotated[
    float, Meta(ge=0, le=_MOST, description='give a finite number, 0 or more')
]  # fmt: skip
Share = Annotated[float, Meta(ge=0, le=1, description='a share; give a number from 0 to 1')]
Part = Annotated[float, Meta(gt=0, le=1, description='give a share above 0, up to 1')]
Whole = Annotated[int, Meta(ge=1, description='give a whole number, 1 or more')]
Count = Annotated[int, Meta(ge=0, description='give a whole number, 0 or more')]


class FieldError(ValueError):
    """A field breaks its rule, or is missing.

    Attributes:
        field: its name.
        rule: what to give.
        problem: the message without the name.
    """

    def __init__(self, field: str, rule: str, value: object = UNSET) -> None:
        self.field, self.rule = field, rule
        self.problem = rule if value is UNSET else f'is {value!r}; {rule}'
        super().__init__(f'{field}: {self.problem}')


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Check a rule of a field. Raises FieldError."""
    if not holds:
        raise FieldError(field, rule, value)


def check(one: Any) -> None:
    """Check all fields of `one` whose type has a rule; None is unknown, and allowed."""
    for name, kind in _rules(one.__class__):
        value = getattr(one, name)
        if value is not None:
            number(name, value, kind)


def number(field: str, value: Any, kind: Any) -> None:
    """Check a value by the rule of a type of this module, or by a Literal. Raises FieldError."""
    if get_origin(kind) is Literal:
        require(value in get_args(kind), field, value, f'give one of {", ".join(get_args(kind))}')
        return
    base, rule = get_args(kind)
    good = base is float or (isinstance(value, int) and not isinstance(value, bool))
    good = good and (rule.gt is None or value > rule.gt) and (rule.ge is None or value >= rule.ge)
    good = good and (rule.le is None or value <= rule.le)
    require(good, field, value, rule.description)


class Checked(Struct, frozen=True):
    """Checks its fields by the rules of their types."""

    def __post_init__(self) -> None:
        check(self)


@cache
def _rules(kind: Any) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(name, one) for name, hint in hints.items() for one in _with_rule(hint)]


def _with_rule(hint: Any) -> Iterator[Any]:
    """The part of a type that has a rule: of `Whole | None`, `Whole`."""
    if get_origin(hint) in (Annotated, Literal):
        yield hint
    elif type(None) in get_args(hint):
        yield from (one for part in get_args(hint) for one in _with_rule(part))
