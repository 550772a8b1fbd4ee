# SPDX-License-Identifier: Apache-2.0
"""A number of the paper beside ours."""

from enum import StrEnum

import msgspec


class Verdict(StrEnum):
    """What our number says about the paper's."""

    FOLLOWS = 'follows'
    DIFFERS = 'differs'
    INPUT = 'input'
    """Taken as an input for the others; there is nothing to recompute it from."""
    NO_INPUTS = 'no inputs'
    """The paper does not give what it would follow from."""
    FINDING = 'finding'
    """Ours only: the paper prints no such number."""


class Cell(msgspec.Struct, frozen=True):
    """A readable cell of a table."""

    table: str
    setting: str
    system: str
    quantity: str
    mtbf: str
    """Column; empty where the cell is for all of them."""
    theirs: float
    ours: float | None
    """From the paper's own inputs, nothing fitted."""
    tolerance: float
    verdict: Verdict
    exact: float | None = None
    """The exact renewal form in place of the first-order one."""
    fitted: float | None = None
    """With the constants fitted to this setting and system (see `fit.Constants`)."""
    fitted_verdict: Verdict | None = None

    @property
    def difference(self) -> float | None:
        """Ours less theirs."""
        return None if self.ours is None else self.ours - self.theirs


class Claim(msgspec.Struct, frozen=True):
    """A number of a figure or of the text."""

    source: str
    statement: str
    theirs: float | None
    """None: a finding about the paper's numbers which it does not print itself."""
    ours: float | None
    verdict: Verdict
    how: str
    """What ours is computed from; says so where a constant is fitted."""

    @property
    def difference(self) -> float | None:
        """Ours less theirs."""
        return None if self.ours is None or self.theirs is None else self.ours - self.theirs


def judge(ours: float, theirs: float, tolerance: float) -> Verdict:
    """FOLLOWS within `tolerance` (absolute), else DIFFERS."""
    within = abs(ours - theirs) <= tolerance + 1e-9
    return Verdict.FOLLOWS if within else Verdict.DIFFERS


def judged(
    source: str, statement: str, theirs: float, ours: float, tolerance: float, how: str
) -> Claim:
    """A claim that a number of ours says something about."""
    return Claim(source, statement, theirs, ours, judge(ours, theirs, tolerance), how)


def found(source: str, statement: str, ours: float, how: str) -> Claim:
    """A finding that the paper prints no number for."""
    return Claim(source, statement, None, float(ours), Verdict.FINDING, how)
