# SPDX-License-Identifier: Apache-2.0
"""What all ranks bring to a meeting, gathered by one of them and handed out to all.

Every rank leaves its own in the store. The last to come reads all, once, and packs them: reports
have most in common, so that of one little more than its differences is left (of one of some KiB:
zlib looks back 32). It does so twice: what repeats at a time is at most 258 bytes long, so that the
first leaves some repetitions of each report, which repeat as well.
"""

import zlib
from collections.abc import Sequence

import msgspec
from torch.distributed import Store

_COUNT_BYTES = 4
_CHUNK_BYTES = (1 << 20) - 16
"""A value in the store has a MiB at most, with what is before it. The server refuses above 8."""
_READ_AT_ONCE = 256


def packed(own: bytes) -> bytes:
    """What a rank leaves."""
    return zlib.compress(own)


def unpacked(left: bytes) -> bytes:
    """What a rank brought, of what it left."""
    return zlib.decompress(left)


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
    return [unpacked(bytes(value)[prefix_bytes:]) for value in found]


def hand_out(store: Store, key: str, items: Sequence[bytes]) -> bytes:
    """Leave everything for all ranks, but for the first part, which is returned.

    Args:
        store: the launcher's.
        key: under which the other parts are.
        items: what the ranks brought, by rank.
    """
    whole = zlib.compress(zlib.compress(msgspec.msgpack.encode(items)))
    chunks = [whole[at : at + _CHUNK_BYTES] for at in range(0, len(whole), _CHUNK_BYTES)]
    for index, chunk in enumerate(chunks[1:]):
        store.set(f'{key}/{index}', chunk)  # type: ignore[arg-type]
    return (len(chunks) - 1).to_bytes(_COUNT_BYTES) + chunks[0]


def handed_out(store: Store, key: str, first: bytes) -> list[bytes]:
    """The same at every rank, from the first part on."""
    count = int.from_bytes(first[:_COUNT_BYTES])
    rest = [store.get(f'{key}/{index}') for index in range(count)]
    whole = zlib.decompress(zlib.decompress(b''.join([first[_COUNT_BYTES:], *rest])))
    return msgspec.msgpack.decode(whole, type=list[bytes])
