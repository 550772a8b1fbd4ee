# SPDX-License-Identifier: Apache-2.0
"""Reports of all ranks in a rendezvous: one rank gathers and packs them for all.

Every rank leaves its report in the store. The last rank to answer reads all reports once, and
compresses them together. Reports are nearly equal, so each adds little more than its differences,
if it has at most some KiB: zlib looks back 32 KiB.
"""

from collections.abc import Sequence

import msgspec
from torch.distributed import Store

from moevement_ext.membership import packing
from moevement_ext.membership.exchange import leave, left_by_all
from moevement_ext.store.peek import read_in_parts

_NAME = 'reports'
_ITEMS = msgspec.msgpack.Decoder(list[bytes])


def gather(store: Store, places: Sequence[str]) -> list[bytes]:
    """The reports under the keys `places`, by rank; all keys exist."""
    items, room = [], packing.MOST_BYTES_OF_ALL
    for value in read_in_parts(store, places):
        items.append(packing.unpacked(value, min(packing.MOST_BYTES, room)))
        room -= len(items[-1])
    return items


def hand_out(store: Store, items: Sequence[bytes]) -> None:
    """Leave all reports in the store of the round, for all ranks."""
    leave(store, _NAME, 0, msgspec.msgpack.encode(items))


def handed_out(store: Store) -> list[bytes]:
    """The reports that `hand_out` has left."""
    (whole,) = left_by_all(store, _NAME, [0], packing.MOST_BYTES_OF_ALL)
    return _ITEMS.decode(whole)
