# SPDX-License-Identifier: Apache-2.0
"""A rule: some values of a flag that exclude a kind of recovery.

A custom loop has no settings for features that only upstream's trainer has.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron.moevement.facts import Settings


def number(settings: Settings, name: str, otherwise: int) -> int:
    """A setting as a number; `otherwise` if the setting is missing or not a number."""
    value = settings.get(name)
    return value if isinstance(value, int) else otherwise


@dataclass(frozen=True)
class Values:
    """A set of values of a flag. None, the value of an absent flag, never belongs to it."""

    words: str
    """Shown after the flag in a table."""
    holds: Callable[[object], bool]


GIVEN = Values('', bool)
"""All values that are true in Python."""
ANY = Values('', lambda value: True)
"""All values, also zero and an empty text."""


def other_than(*names: str) -> Values:
    """All values except `names`."""
    return Values(f'other than {" and ".join(names)}', lambda value: value not in names)


def equal_to(wanted: str | int) -> Values:
    """One value."""
    return Values(str(wanted), lambda value: value == wanted)


def above(limit: int) -> Values:
    """Numbers above `limit`."""
    return Values(f'above {limit}', lambda value: isinstance(value, int) and value > limit)


@dataclass(frozen=True)
class Condition:
    """A condition on other flags, in addition to the value of the rule's flag."""

    words: str
    """Shown after the flag and its values in a table or message."""
    holds: Callable[[Settings], bool]


ALWAYS = Condition('', lambda settings: True)


@dataclass(frozen=True)
class Rule:
    """Some values of a flag exclude a kind of recovery."""

    flag: str
    """The flag as the user writes it, with dashes."""
    values: Values
    remedy: str
    """What to do instead, as a command: 'leave it out'."""
    reason: str
    """Cause of the exclusion, as a clause without a full stop."""
    when: Condition = ALWAYS
    dest: str | None = None
    """Name of the setting, if it differs from the flag."""

    @property
    def setting(self) -> str:
        """Name of the setting that the rule reads."""
        return self.dest or self.flag.removeprefix('--').replace('-', '_')

    def applies(self, settings: Settings) -> bool:
        """True if the rule excludes `settings`."""
        value = settings.get(self.setting)
        return value is not None and self.values.holds(value) and self.when.holds(settings)

    def shown(self, settings: Settings) -> str:
        """The flag with its value, as on a command line."""
        value = settings[self.setting]
        words = f' {value}' if isinstance(value, str | int | float) and value is not True else ''
        return f'{self.flag}{words}{self.when.words and " "}{self.when.words}'
