# SPDX-License-Identifier: Apache-2.0
"""Reports of all ranks in a rendezvous: one rank gathers and packs them for all.

Every rank leaves its report in the store. The last rank to answer reads all reports once, and
compresses them together. Reports are nearly equal, so each adds little more than its differences,
if it has at most some KiB: zlib looks back 32 KiB. Compression runs twice: one match of zlib has at
most 258 bytes, so the first pass leaves a series of matches per report, which repeats as well.
"""

from collections.abc import Sequence

import msgspec
from torch.distributed import Store

from moevement_ext.membership import packing
from moevement_ext.membership.node_copy import NodeCopy, digest_of
from moevement_ext.store.peek import read_in_parts

_COUNT_BYTES = 4
# Up to this size the reports are the value of the barrier's key, and take no further request; above
# it one rank of each node reads them for all its ranks.
_LITTLE_BYTES = 4096
# Values in the store are limited to 1 MiB here; its server refuses more than 8 MiB.
_CHUNK_BYTES = 1 << 20


def gather(store: Store, places: Sequence[str]) -> list[bytes]:
    """The reports under the keys `places`, by rank; all keys exist."""
    items, room = [], packing.MOST_BYTES_OF_ALL
    for value in read_in_parts(store, places):
        items.append(packing.unpacked(value, min(packing.MOST_BYTES, room)))
        room -= len(items[-1])
    return items


def packed_together(items: Sequence[bytes]) -> bytes:
    return packing.packed(packing.packed(msgspec.msgpack.encode(items)))


def unpacked_together(whole: bytes) -> list[bytes]:
    once = packing.unpacked(whole, packing.MOST_BYTES_OF_ALL)
    all_of_it = packing.unpacked(once, packing.MOST_BYTES_OF_ALL)
    return msgspec.msgpack.decode(all_of_it, type=list[bytes])


def hand_out(store: Store, key: str, items: Sequence[bytes]) -> bytes:
    """Leave all reports in the store for all ranks; returns the bytes to put behind the barrier.

    These are the packed reports if they are small, else the number of parts under `key` and the
    digest of the whole.
    """
    whole = packed_together(items)
    if len(whole) <= _LITTLE_BYTES:
        return (0).to_bytes(_COUNT_BYTES) + whole
    chunks = [whole[at : at + _CHUNK_BYTES] for at in range(0, len(whole), _CHUNK_BYTES)]
    for index, chunk in enumerate(chunks):
        store.set(_part(key, index), chunk)  # type: ignore[arg-type]
    return len(chunks).to_bytes(_COUNT_BYTES) + digest_of(whole)


def handed_out(store: Store, key: str, found: bytes, node: NodeCopy | None) -> list[bytes]:
    """The reports that `hand_out` has left; `found` are the bytes behind the barrier.

    Without `node` each rank reads all parts from the store.
    """

    def from_store() -> bytes:
        return b''.join(store.get(_part(key, index)) for index in range(count))

    count, rest = int.from_bytes(found[:_COUNT_BYTES]), found[_COUNT_BYTES:]
    if not count:
        whole = rest
    elif node is None:
        whole = from_store()
    else:
        whole = node.read(rest, from_store)
    return unpacked_together(whole)


def _part(key: str, index: int) -> str:
    return f'{key}/{index}'
