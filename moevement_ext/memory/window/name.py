# SPDX-License-Identifier: Apache-2.0
"""How windows, their parts and ranks are named."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec


class WindowName(NamedTuple):
    """What tells two windows of one owner apart: start iteration and digest of the plan."""

    start: int
    plan: str


@dataclass(frozen=True)
class RankIdentity:
    """What every slot is stamped with, and what is compared before one is loaded."""

    run: str
    topology: str
    rank: int


class Candidate(msgspec.Struct, frozen=True, order=True):
    """A window of all ranks: the same start, W and plan digest everywhere."""

    start: int
    window: int
    plan: str

    @property
    def dense_at(self) -> int:
        """Iteration at which its conversion ends: every operator is active and consistent."""
        return self.start + self.window - 1


class HeldWindow(msgspec.Struct, frozen=True, order=True):
    """The part of one owner, committed on some node."""

    candidate: Candidate
    owner: int


class WindowRef(NamedTuple):
    """A committed window of one owner."""

    start: int
    plan: str
    path: Path


class FoundWindow(NamedTuple):
    """A committed window found on this node."""

    holder: int
    owner: int
    start: int
    plan: str
    path: Path
