# SPDX-License-Identifier: Apache-2.0
"""What all ranks bring to a meeting, gathered by one of them and handed out to all.

Every rank leaves its own in the store. The last to come reads all, once, and packs them: reports
have most in common, so that of one little more than its differences is left (of one of some KiB:
zlib looks back 32).
"""

import zlib
from collections.abc import Sequence

import msgspec
from torch.distributed import Store

_COUNT_BYTES = 4
_CHUNK_BYTES = (1 << 20) - _COUNT_BYTES
"""A value in the store has a MiB at most; its server refuses more than 8."""
_READ_AT_ONCE = 256


def packed(own: bytes) -> bytes:
    """What a rank leaves."""
    return zlib.compress(own)


def gather(store: Store, places: Sequence[str], prefix_bytes: int) -> list[bytes]:
    """What each rank left, by rank.

    Args:
        store: the launcher's.
        places: keys, by rank, which are there.
        prefix_bytes: of each value, before what is `packed`.
    """
    found: list[bytes] = []
    for at in range(0, len(places), _READ_AT_ONCE):  # others are served in between
        found += store.multi_get(list(places[at : at + _READ_AT_ONCE]))
    return [zlib.decompress(bytes(value)[prefix_bytes:]) for value in found]


def hand_out(store: Store, key: str, items: Sequence[bytes]) -> None:
    """Leave everything for all ranks; whoever sees the first value can have the others."""
    whole = zlib.compress(msgspec.msgpack.encode(items))
    chunks = [whole[at : at + _CHUNK_BYTES] for at in range(0, len(whole), _CHUNK_BYTES)]
    for index in reversed(range(len(chunks))):
        count = len(chunks).to_bytes(_COUNT_BYTES) if index == 0 else b''
        store.set(f'{key}/{index}', count + chunks[index])  # type: ignore[arg-type]


def handed_out(store: Store, key: str) -> list[bytes]:
    """The same at every rank, once it was handed out."""
    first = store.get(f'{key}/0')
    rest = [f'{key}/{index}' for index in range(1, int.from_bytes(first[:_COUNT_BYTES]))]
    whole = b''.join([first[_COUNT_BYTES:], *(store.get(one) for one in rest)])
    return msgspec.msgpack.decode(zlib.decompress(whole), type=list[bytes])
