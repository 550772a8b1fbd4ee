# SPDX-License-Identifier: Apache-2.0
"""What an entry of the list says.

Settings are upstream's parsed arguments, or what stands for them in a loop of one's own, which has
no attributes for what such a loop does not have.
"""

from collections.abc import Callable
from dataclasses import dataclass


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
    holds: Callable[[object], bool]


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
    """The attribute of the settings, where it is not the flag's own name."""

    @property
    def setting(self) -> str:
        """The attribute of the settings that the rule looks at."""
        return self.dest or self.flag.removeprefix('--').replace('-', '_')

    def applies(self, settings: object) -> bool:
        """True if `settings` have such a value."""
        value = getattr(settings, self.setting, None)
        return value is not None and self.values.holds(value) and self.when.holds(settings)

    def shown(self, settings: object) -> str:
        """The flag with its value, as the user has written it."""
        value = getattr(settings, self.setting)
        words = f' {value}' if isinstance(value, str | int | float) and value is not True else ''
        return f'{self.flag}{words}{self.when.words and " "}{self.when.words}'


@dataclass(frozen=True)
class Group:
    """Flags that may have any value, but for those that a rule names."""

    title: str
    """What they are about."""
    because: str
    """Why they may stay; names tests where there are any."""
    settings: tuple[str, ...]
    """Attributes of upstream's arguments."""


def group(title: str, because: str, settings: str) -> Group:
    """A group of the settings that are named in a text."""
    return Group(title, because, tuple(settings.split()))
