# SPDX-License-Identifier: Apache-2.0
"""Interface to the trainer for moving its state to another layout."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, Protocol

from moevement_ext.memory.window.placed import Layout, Seat


class Division(NamedTuple):
    """How elements of a rank's shard lie in the whole tensor: in blocks, one after the other.

    A tensor [rows, columns] divided by rows has one block per shard, or one for each half of a
    gated unit; divided by columns, each row is a block.
    """

    block: int = 0
    """Elements of a block of the shard; 0: the shard is the whole tensor."""
    shards: int = 1
    shard: int = 0

    def ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Ranges of the whole tensor for elements `start` to `end` of the shard, in order."""
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

        Raises `RefusedWindow`, which names the setting that must not change.
        """

    def name_of(self, operator: str, tensor: str, seat: Seat) -> str:
        """Layout-independent name of a record's tensor on the rank at `seat`.

        The name includes the shard, unless `division_of` gives the place of the shard in
        the tensor.
        """

    def division_of(self, operator: str, part: str, tensor: str, owner: int | None) -> Division:
        """Division of a record's tensor, if the two layouts divide it differently.

        Called after `state_owners`. `owner` is a rank of the other layout; None: this rank.
        Raises `RefusedWindow` if the layouts divide a value that belongs to the whole
        shard, such as a scale.
        """

    def state_owners(self, seats: Mapping[int, Seat]) -> Collection[int]:
        """Owners whose auxiliary state is the source of this rank's; `seats` has all owners."""

    def auxiliary_state(self, states: Mapping[int, bytes]) -> bytes:
        """Merge the auxiliary states of `state_owners`; `RefusedWindow` if contradictory."""

    def kept(self, was: Layout) -> str:
        """Log text: which random number streams continue from layout `was` and which restart."""
