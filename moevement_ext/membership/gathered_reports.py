# SPDX-License-Identifier: Apache-2.0
"""What all ranks bring to a rendezvous, gathered by one of them and handed out to all.

Every rank leaves its own in the store. The last to come reads all, once, and packs them: reports
have most in common, so that of one little more than its differences is left (of one of some KiB:
zlib looks back 32). It does so twice: what repeats at a time is at most 258 bytes long, so that the
first leaves some repetitions of each report, which repeat as well.
"""

from collections.abc import Sequence

import msgspec
from torch.distributed import Store

from moevement_ext.membership import packing
from moevement_ext.membership.node_copy import NodeCopy, digest_of
from moevement_ext.store.peek import read_in_parts

_COUNT_BYTES = 4
# Read with the barrier, in one request; more is read by one rank of a node for all.
_LITTLE_BYTES = 4096
# A value in the store has a MiB at most. The server refuses above 8.
_CHUNK_BYTES = 1 << 20


def gather(store: Store, places: Sequence[str]) -> list[bytes]:
    """What each rank left under its key in `places`, by rank; all are there."""
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
    """Leave everything for all ranks, by rank; what is to be behind the barrier is returned.

    That is all of it if it is little, else how many parts there are under `key`, and the digest of
    the whole.
    """
    whole = packed_together(items)
    if len(whole) <= _LITTLE_BYTES:
        return (0).to_bytes(_COUNT_BYTES) + whole
    chunks = [whole[at : at + _CHUNK_BYTES] for at in range(0, len(whole), _CHUNK_BYTES)]
    for index, chunk in enumerate(chunks):
        store.set(_part(key, index), chunk)  # type: ignore[arg-type]
    return len(chunks).to_bytes(_COUNT_BYTES) + digest_of(whole)


def handed_out(store: Store, key: str, found: bytes, node: NodeCopy | None) -> list[bytes]:
    """What `hand_out` left, `found` behind the barrier; without `node` each rank reads all."""

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
