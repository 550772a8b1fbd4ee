# SPDX-License-Identifier: Apache-2.0
"""Names of windows, their parts and ranks."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from moevement_ext.memory.window.placed import Placed
from moevement_ext.memory.window.settings import RunSettings

Count = Annotated[int, msgspec.Meta(ge=0)]
"""A non-negative integer; decoders of files and messages check this."""


@dataclass(frozen=True)
class RankIdentity:
    """Run, layout and rank: stored in every slot, and compared before a slot is loaded."""

    run: str
    """Digest of the run: model, data, hyperparameters."""
    topology: str
    """Digest of the parallel layout."""
    rank: int
    """Global rank, which owns the windows that it captures."""
    settings: RunSettings = field(default=RunSettings(), compare=False)
    """The digested settings and more, as `bounded` returns them."""
    placed: Placed | None = field(default=None, compare=False)
    """Layout and place of the rank; None if the trainer has no numbers for them."""


class WindowName(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Start and plan of a window, which distinguish the windows of one owner."""

    start: Count
    plan: str
    """Digest of the plan (which operators in which slot)."""

    def __str__(self) -> str:
        return f'{self.start}-{self.plan}'


class Window(msgspec.Struct, frozen=True, order=True, gc=False):
    """A window, independent of the rank: name and length are the same on all ranks."""

    name: WindowName
    length: int
    """W, iterations (and slots) in the window."""

    @property
    def start(self) -> int:
        """Iteration whose state its first slot holds."""
        return self.name.start

    @property
    def dense_at(self) -> int:
        """Iteration at which the conversion ends: every operator is active and consistent."""
        return self.start + self.length - 1


class HeldWindow(msgspec.Struct, frozen=True, order=True, gc=False):
    """One owner's part of a window, committed on some node."""

    window: Window
    owner: int


class StoredWindow(NamedTuple):
    """One owner's part of a window, committed in a file on this node."""

    holder: int
    """Rank that keeps the file: the owner, or a peer for its replica."""
    owner: int
    name: WindowName
    path: Path
