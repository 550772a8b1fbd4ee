# SPDX-License-Identifier: Apache-2.0
"""Interface to the trainer for moving its state to another layout."""

from collections.abc import Collection, Mapping
from typing import Protocol

from moevement_ext.memory.window.placed import Layout, Seat


class Relaying(Protocol):
    """Names in every layout, and the auxiliary state of this one. Training thread."""

    def refuse(self, was: Layout) -> None:
        """Refuse an earlier layout whose state cannot be converted to this layout.

        Raises:
            RefusedWindow: the message names the setting that must not change.
        """

    def name_of(self, operator: str, tensor: str, seat: Seat) -> str:
        """Name of a tensor in every layout, with its shard if tensors are split.

        Args:
            operator: as in a record.
            tensor: as in a record.
            seat: place of the rank that has it.
        """

    def state_owners(self, seats: Mapping[int, Seat]) -> Collection[int]:
        """Owners whose auxiliary state is the source of this rank's.

        Args:
            seats: of all owners.
        """

    def auxiliary_state(self, states: Mapping[int, bytes]) -> bytes:
        """Merge the auxiliary states of `state_owners` into that of this rank.

        Raises:
            RefusedWindow: they contradict each other.
        """

    def kept(self, was: Layout) -> str:
        """Log text: which random number streams continue and which restart.

        Args:
            was: the other layout.
        """
