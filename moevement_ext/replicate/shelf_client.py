# SPDX-License-Identifier: Apache-2.0
"""Client of a peer that has windows of another layout."""

from collections.abc import Sequence

import xxhash

from moevement_ext.memory.shelf import Part
from moevement_ext.memory.window.refused import RefusedWindow
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.replicate.client import ReplicaClient
from moevement_ext.replicate.protocol import FetchPart, FetchRanges, RangesHead

Range = tuple[int, int, int]
"""Index of a record in the header of its slot, first byte within it, and one past the last."""


class ShelfClient(ReplicaClient):
    """Fetches headers and ranges of records; errors as in `ReplicaClient`."""

    def fetch_part(self, part: Part) -> list[SlotHeader]:
        """Headers of a part, slot 0 first; `RefusedWindow` if damaged, or no whole window."""
        headers = self._headers(FetchPart(part))
        if [header.slot for header in headers] != list(range(part.window.length)):
            raise RefusedWindow(f'window {part.window.start} of rank {part.owner} is not whole')
        return headers

    def fetch_ranges(
        self, part: Part, slot: int, ranges: Sequence[Range], into: Sequence[memoryview]
    ) -> None:
        """Receive ranges of records into places of the same sizes.

        Raises `RefusedWindow` if the received bytes differ from the peer's.
        """
        nbytes = sum(map(len, into))
        with self._exchange(nbytes) as connection:
            connection.send(FetchRanges(part, slot, list(ranges)))
            head = self._expected(connection, RangesHead)
            if head.nbytes != nbytes:
                raise RefusedWindow(f'{head.nbytes} bytes are announced, {nbytes} were asked for')
            digest = xxhash.xxh3_64()
            for view in into:
                connection.receive_into(view)
                digest.update(view)
        if digest.intdigest() != head.checksum:
            host, port = self.address
            raise RefusedWindow(f'ranges from peer {host}:{port} are damaged: checksum mismatch')
