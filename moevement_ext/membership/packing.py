# SPDX-License-Identifier: Apache-2.0
"""Compresses the data that ranks leave for each other in the store.

Any process that reaches the store can put a few KiB there which would unpack to all the memory of
each node; so the unpacked size is limited.
"""

import zlib

MOST_BYTES = 64 << 20
"""Limit for one rank; names of thousands of operators are some MiB."""
MOST_BYTES_OF_ALL = 2 << 30
"""Limit for all ranks together."""


def packed(content: bytes) -> bytes:
    return zlib.compress(content)


def unpacked(content: bytes, most: int | None = None) -> bytes:
    """Undo `packed`; `ValueError` if that gives more than `most` bytes (`MOST_BYTES`), or fails."""
    most = MOST_BYTES if most is None else most
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(content, most + 1)
    except zlib.error as error:
        raise ValueError(f'what a rank left in the store cannot be unpacked: {error}') from error
    if len(found) > most:
        raise ValueError(f'what a rank left in the store unpacks to more than {most} bytes')
    if not reader.eof:
        raise ValueError('what a rank left in the store is cut off')
    return found
