# SPDX-License-Identifier: Apache-2.0
"""How windows, their parts and ranks are named."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from moevement_ext.memory.window.settings import RunSettings

Count = Annotated[int, msgspec.Meta(ge=0)]
"""A number that is not negative, which is checked when it comes from a file or from the wire."""


@dataclass(frozen=True)
class RankIdentity:
    """Run, layout and rank: stamped on every slot, and compared before one is loaded."""

    run: str
    """Digest of the run: model, data, hyperparameters."""
    topology: str
    """Digest of the parallel layout."""
    rank: int
    """Global rank: the owner of what it captures."""
    settings: RunSettings = field(default=RunSettings(), compare=False)
    """What the digests are of, and more; `bounded`."""


class WindowName(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Start and plan of a window, which tell two windows of one owner apart."""

    start: Count
    """Iteration whose state its first slot holds."""
    plan: str
    """Digest of the plan (which operators in which slot)."""

    def __str__(self) -> str:
        return f'{self.start}-{self.plan}'


class Window(msgspec.Struct, frozen=True, order=True, gc=False):
    """A window, of whichever rank: name and length are the same on all of them."""

    name: WindowName
    length: int
    """W, iterations (and slots) in the window."""

    @property
    def start(self) -> int:
        """Iteration whose state its first slot holds."""
        return self.name.start

    @property
    def dense_at(self) -> int:
        """Iteration at which its conversion ends: every operator is active and consistent."""
        return self.start + self.length - 1


class HeldWindow(msgspec.Struct, frozen=True, order=True, gc=False):
    """One owner's part of a window, committed on some node."""

    window: Window
    owner: int
    """Rank whose state it is."""


class StoredWindow(NamedTuple):
    """One owner's part of a window, committed in a file on this node."""

    holder: int
    """Rank that keeps the file: the owner, or a peer for its replica."""
    owner: int
    """Rank whose state it is."""
    name: WindowName
    path: Path
