# SPDX-License-Identifier: Apache-2.0
"""Rules of fields, as types: msgspec checks them in files, `parser_of` in flags."""

import argparse
import math
from collections.abc import Callable
from typing import Annotated, Any, get_args

import msgspec
from msgspec import UNSET, Meta

_MOST = math.nextafter(math.inf, 0)
Positive = Annotated[float, Meta(gt=0, le=_MOST, description='give a number above 0')]
PositiveOrInfinite = Annotated[float, Meta(gt=0, description='give a number above 0 (inf: never)')]
NotNegative = Annotated[float, Meta(ge=0, le=_MOST, description='give a number, 0 or more')]
Share = Annotated[float, Meta(ge=0, le=1, description='a share; give a number from 0 to 1')]
Chance = Annotated[
    float, Meta(ge=0, le=math.nextafter(1, 0), description='give a number from 0 to below 1')
]
Part = Annotated[float, Meta(gt=0, le=1, description='give a share above 0, up to 1')]
Whole = Annotated[int, Meta(ge=1, description='give a whole number, 1 or more')]
Count = Annotated[int, Meta(ge=0, description='give a whole number, 0 or more')]


class FieldError(ValueError):
    """A field breaks its rule, or is missing.

    Attributes:
        field: its name.
        problem: the message without the name.
    """

    def __init__(self, field: str, rule: str, value: object = UNSET) -> None:
        self.field, self.problem = field, rule if value is UNSET else f'is {value!r}; {rule}'
        super().__init__(f'{field}: {self.problem}')


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Check a rule of a field. Raises FieldError."""
    if not holds:
        raise FieldError(field, rule, value)


def parser_of(kind: Any) -> Callable[[str], Any]:
    """A type of argparse that converts a text to a type with a rule, or to an optional one."""
    parts = (one for part in (kind, *get_args(kind)) for one in get_args(part))
    rules = [one.description for one in parts if isinstance(one, Meta)]

    def parse(text: str) -> Any:
        try:
            return msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError as error:
            raise argparse.ArgumentTypeError(f'{text}: {rules[0] if rules else error}') from None

    return parse
