# SPDX-License-Identifier: Apache-2.0
"""Small collectives at start-up, and the compressed bytes that ranks leave for each other.

Fault-free iterations use none of them. Any process that reaches the store can put a few KiB there
which would unpack to all the memory of each node; so the unpacked size is limited.

In a rendezvous every rank leaves its report in the store. The last rank to answer reads all reports
once, and compresses them together. Reports are nearly equal, so each adds little more than its
differences, if it has at most some KiB: zlib looks back 32 KiB.
"""

import zlib
from collections.abc import Iterator, Sequence

import msgspec
import torch
from torch.distributed import Store, all_gather_object, broadcast_object_list

from moevement_ext.store_answers import read_in_parts

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


_COUNT_BYTES = 4
# Values in the store are limited to 1 MiB here; its server refuses more than 8 MiB.
_CHUNK_BYTES = (1 << 20) - _COUNT_BYTES


class Exchange:
    """Sends bytes to all other ranks and returns theirs.

    At the start of a job this is a collective, and every rank also leaves its bytes in the
    launcher's store. A replacement process reads them there, including those of its predecessor,
    since the other ranks are training.

    `archive` is a store that outlives the workers; None if no process is ever replaced.
    """

    def __init__(self, archive: Store | None = None, joining: bool = False) -> None:
        self._archive = archive
        self.joining = joining

    def __call__(self, name: str, own: bytes) -> list[bytes]:
        """The bytes of every rank, by rank; `name` is used once in an attempt of the job."""
        return self.among(name, own, range(torch.distributed.get_world_size()), None)

    def among(
        self,
        name: str,
        own: bytes,
        ranks: Sequence[int],
        group: torch.distributed.ProcessGroup | None,
    ) -> list[bytes]:
        """The bytes of some global ranks, in the order of `ranks`; all of these ranks call this.

        `group` has these ranks in this order; None: all ranks.
        """
        if self.joining:
            assert self._archive is not None  # else no process could join
            return left_by_all(self._archive, name, ranks)
        if self._archive is not None:
            leave(self._archive, name, torch.distributed.get_rank(), own)
        everyone: list[bytes] = [b''] * len(ranks)
        all_gather_object(everyone, own, group)
        return everyone

    @staticmethod
    def from_first(
        own: bytes, ranks: Sequence[int], group: torch.distributed.ProcessGroup | None
    ) -> bytes:
        """The bytes of the first of `ranks`; all of them call this, at the start of a job."""
        given = [own]
        if len(ranks) > 1:
            broadcast_object_list(given, src=ranks[0], group=group)
        return given[0]

    def all_agree(self, name: str, own: bool) -> bool:
        """True if `own` is true on every rank."""
        answers = self(name, b'1' if own else b'0')
        return own and all(answer == b'1' for answer in answers)


def leave(store: Store, name: str, rank: int, own: bytes) -> None:
    """Leave a rank's bytes in the store, for processes that join later.

    They are compressed, as names of operators repeat; the first chunk has the number of chunks.
    """
    content = packed(own)
    chunks = [content[at : at + _CHUNK_BYTES] for at in range(0, len(content), _CHUNK_BYTES)]
    for index in reversed(range(len(chunks))):  # the first chunk is written last
        count = len(chunks).to_bytes(_COUNT_BYTES) if index == 0 else b''
        store.set(_key(name, rank, index), count + chunks[index])  # type: ignore[arg-type]


def left_by(store: Store, name: str, rank: int) -> bytes | None:
    """The bytes that `leave` has stored for a rank; None if there are none yet."""
    if not store.check([_key(name, rank, 0)]):
        return None
    return left_by_all(store, name, [rank])[0]


def left_by_all(
    store: Store, name: str, ranks: Sequence[int], most: int | None = None
) -> list[bytes]:
    """The bytes that `leave` has stored for each of `ranks`; waits for them.

    `most` limits those of one rank (None: `packing.MOST_BYTES`): `ValueError`.
    """
    firsts = read_in_parts(store, [_key(name, rank, 0) for rank in ranks])
    return [
        unpacked(b''.join(_chunks(store, name, rank, first)), most)
        for rank, first in zip(ranks, firsts, strict=True)
    ]


def _chunks(store: Store, name: str, rank: int, first: bytes) -> Iterator[bytes]:
    yield first[_COUNT_BYTES:]
    for index in range(1, int.from_bytes(first[:_COUNT_BYTES])):
        yield store.get(_key(name, rank, index))


def _key(name: str, rank: int, chunk: int) -> str:
    return f'exchange/{name}/{rank}/{chunk}'


_REPORTS = 'reports'
_REPORT_LIST = msgspec.msgpack.Decoder(list[bytes])


def gather(store: Store, places: Sequence[str]) -> list[bytes]:
    """The reports under the keys `places`, by rank; all keys exist."""
    items, room = [], MOST_BYTES_OF_ALL
    for value in read_in_parts(store, places):
        items.append(unpacked(value, min(MOST_BYTES, room)))
        room -= len(items[-1])
    return items


def hand_out(store: Store, items: Sequence[bytes]) -> None:
    """Leave all reports in the store of the round, for all ranks."""
    leave(store, _REPORTS, 0, msgspec.msgpack.encode(items))


def handed_out(store: Store) -> list[bytes]:
    """The reports that `hand_out` has left."""
    (whole,) = left_by_all(store, _REPORTS, [0], MOST_BYTES_OF_ALL)
    return _REPORT_LIST.decode(whole)
