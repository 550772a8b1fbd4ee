# SPDX-License-Identifier: Apache-2.0
"""Host memory that a rank requests, for itself and for its twins."""

from collections.abc import Sequence
from typing import NamedTuple

from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.sizing import NOTHING_LOGGED, Logged
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.twin import OwnParts


class Share(NamedTuple):
    """Contents and sizes of one rank's host memory."""

    identity: RankIdentity
    capacity_bytes: int
    """Size of one window file of this rank."""
    logged: Logged = NOTHING_LOGGED
    hosts_replicas: bool = True
    """Hold the replicas placed here; otherwise their owners have one copy fewer."""
    disk: DiskWindows | None = None
    longest_window: int | None = None
    """The W that all sizes are for; None: as configured."""
    window: int | None = None
    """The first W, for which files and log have room; None: the longest."""
    twin: 'TwinShare | None' = None
    """Stubs of this rank's windows at its twins; None: no twins."""
    shorter: Sequence[tuple[int, int]] = ()
    """Sizes for shorter windows; see `Member.shorter`."""


class TwinShare(NamedTuple):
    """Description of a rank for its twins."""

    family: int
    stub_bytes: int
    slot_bytes: int
    own_parts: OwnParts
    """Parts that may differ at a twin."""
