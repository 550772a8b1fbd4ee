# SPDX-License-Identifier: Apache-2.0
"""Interface to the trainer for moving its state to another layout."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, Protocol

from moevement_ext.memory.window.placed import Layout, Seat


class Division(NamedTuple):
    """How elements of a rank's shard lie in the whole tensor: in blocks, one after the other.

    Of a tensor [rows, columns] that is divided by rows, the shard is one block, or one for each of
    the halves of a gated unit; by columns, each row is a block.
    """

    block: int = 0
    """Elements of a block of the shard; 0: the shard is the whole tensor."""
    shards: int = 1
    shard: int = 0

    def ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Ranges of the whole tensor that elements `start` to `end` of the shard are, in order."""
        if not self.block:
            yield start, end
            return
        at = start
        while at < end:
            number, within = divmod(at, self.block)
            count = min(self.block - within, end - at)
            first = (number * self.shards + self.shard) * self.block + within
            yield first, first + count
            at += count


class Relaying(Protocol):
    """Names in every layout, and the auxiliary state of this one. Training thread."""

    def refuse(self, was: Layout) -> None:
        """Refuse an earlier layout whose state cannot be converted to this layout.

        Raises:
            RefusedWindow: the message names the setting that must not change.
        """

    def name_of(self, operator: str, tensor: str, seat: Seat) -> str:
        """Name of a tensor in every layout, with its shard unless `division_of` says where it lies.

        Args:
            operator: as in a record.
            tensor: as in a record.
            seat: place of the rank that has it.
        """

    def division_of(self, operator: str, part: str, tensor: str, owner: int | None) -> Division:
        """Where a shard lies in its tensor, if the layouts divide that differently.

        Called after `state_owners`.

        Args:
            operator: as in a record.
            part: as in a record.
            tensor: as in a record.
            owner: in the other layout; None: this rank.

        Raises:
            RefusedWindow: what belongs to a shard as a whole, such as a scale, cannot be divided.
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
