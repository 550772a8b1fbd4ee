# SPDX-License-Identifier: Apache-2.0
"""What a trainer must say for its state to move to another layout."""

from collections.abc import Collection, Mapping
from typing import Protocol

from moevement_ext.memory.window.placed import Layout, Seat


class Relaying(Protocol):
    """Names in every layout, and the auxiliary state of this one. Training thread."""

    def refuse(self, was: Layout) -> None:
        """Refuse a layout whose tensors this one cannot be made of.

        Raises:
            RefusedWindow: the message says what must be as it was.
        """

    def name_of(self, operator: str, tensor: str, seat: Seat) -> str:
        """Name of a tensor in every layout, with its shard if tensors are split.

        Args:
            operator: as in a record.
            tensor: as in a record.
            seat: place of the rank that has it.
        """

    def state_owners(self, seats: Mapping[int, Seat]) -> Collection[int]:
        """Owners of whose auxiliary state this rank's is made.

        Args:
            seats: of all owners.
        """

    def auxiliary_state(self, states: Mapping[int, bytes]) -> bytes:
        """Auxiliary state of this rank, made of those of `state_owners`.

        Raises:
            RefusedWindow: they contradict each other.
        """

    def kept(self, was: Layout) -> str:
        """What of random numbers goes on, and what begins anew, in words for the log.

        Args:
            was: the other layout.
        """
