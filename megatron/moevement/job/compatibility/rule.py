# SPDX-License-Identifier: Apache-2.0
"""What an entry of a list says.

A loop of one's own has no settings for what only upstream's trainer does.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron.moevement.facts import Settings


def number(settings: Settings, name: str, otherwise: int) -> int:
    """A setting that is a number, where it is one."""
    value = settings.get(name)
    return value if isinstance(value, int) else otherwise


@dataclass(frozen=True)
class Values:
    """Some values of a flag; None, which says nothing, is never one of them."""

    words: str
    """In a table, after the flag."""
    holds: Callable[[object], bool]


GIVEN = Values('', bool)
"""Anything but nothing, zero and false."""
ANY = Values('', lambda value: True)
"""Also zero and an empty text."""


def other_than(*names: str) -> Values:
    """All values but some."""
    return Values(f'other than {" and ".join(names)}', lambda value: value not in names)


def equal_to(wanted: str | int) -> Values:
    """One value."""
    return Values(str(wanted), lambda value: value == wanted)


def above(limit: int) -> Values:
    """Numbers above a limit."""
    return Values(f'above {limit}', lambda value: isinstance(value, int) and value > limit)


@dataclass(frozen=True)
class Condition:
    """What other flags must say for a rule to hold."""

    words: str
    """In a table and a message, after the values of the flag."""
    holds: Callable[[Settings], bool]


ALWAYS = Condition('', lambda settings: True)


@dataclass(frozen=True)
class Rule:
    """A kind of recovery does not go with some values of a flag."""

    flag: str
    """The flag in the user's spelling, with its dashes."""
    values: Values
    remedy: str
    """What to do instead, as a command: 'leave it out'."""
    reason: str
    """Why it does not go, as a clause without a full stop."""
    when: Condition = ALWAYS
    dest: str | None = None
    """The name of the setting, where it is not the flag's own."""

    @property
    def setting(self) -> str:
        """The name of the setting that the rule looks at."""
        return self.dest or self.flag.removeprefix('--').replace('-', '_')

    def applies(self, settings: Settings) -> bool:
        """True if `settings` have such a value."""
        value = settings.get(self.setting)
        return value is not None and self.values.holds(value) and self.when.holds(settings)

    def shown(self, settings: Settings) -> str:
        """The flag with its value, as the user has written it."""
        value = settings[self.setting]
        words = f' {value}' if isinstance(value, str | int | float) and value is not True else ''
        return f'{self.flag}{words}{self.when.words and " "}{self.when.words}'
