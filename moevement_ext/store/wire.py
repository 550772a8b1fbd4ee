# SPDX-License-Identifier: Apache-2.0
"""What a client of torch's `TCPStore` sends, and what it is answered.

Numbers are little-endian; a key or value is its length and its bytes; all keys begin with a slash,
which is a part of them here. Private to torch: checked against 2.11 to 2.15, and by the tests with
the one that is installed.
"""

import struct
from asyncio import StreamReader
from collections.abc import Sequence
from enum import IntEnum

import msgspec

MAGIC = 0x3C85F7CE
ARRIVED, CANCELLED = b'\0', b'\1'
_MOST_BYTES = 8 << 20
"""In a key or value; torch's server takes no more either."""
_MOST_KEYS = 1 << 20


class Kind(IntEnum):
    """What is asked for."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    NUM_KEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    LIST_KEYS = 17


UNANSWERED = {Kind.VALIDATE, Kind.SET, Kind.APPEND, Kind.MULTI_SET}
_NUMBER = {Kind.VALIDATE: '<I', Kind.PING: '<I', Kind.ADD: '<q'}
"""What is sent besides keys and values, and how."""
_KEYS = {Kind.CHECK, Kind.WAIT, Kind.MULTI_GET, Kind.MULTI_SET}
"""Kinds that say how many keys they have."""
_VALUES_OF_A_KEY = {Kind.SET: 1, Kind.APPEND: 1, Kind.COMPARE_SET: 2, Kind.MULTI_SET: 1}
_WITHOUT_KEY = {Kind.VALIDATE, Kind.PING, Kind.NUM_KEYS, Kind.CANCEL_WAIT, Kind.LIST_KEYS}
_HEAD_BYTES = {Kind.CHECK: 1, Kind.WAIT: 1, Kind.PING: 4}
"""With which an answer begins; of others, eight."""


class Request(msgspec.Struct, frozen=True):
    """One question of a client."""

    kind: Kind
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    """Those that belong to the first key, to the second, and so on."""
    number: int = 0
    """What is added, or proves that somebody answers."""


async def read_request(reader: StreamReader) -> Request:
    """The next question.

    Raises:
        EOFError: the client is gone.
        ValueError: it is none of a store, or one of a torch that is not known here.
    """
    kind = Kind((await reader.readexactly(1))[0])
    count = await _count(reader, _MOST_KEYS) if kind in _KEYS else int(kind not in _WITHOUT_KEY)
    keys, values = [], []
    for _ in range(count):
        keys.append(await _text(reader))
        values += [await _text(reader) for _ in range(_VALUES_OF_A_KEY.get(kind, 0))]
    number = await _number(reader, _NUMBER[kind]) if kind in _NUMBER else 0
    return Request(kind, tuple(keys), tuple(values), number)


def encoded(request: Request) -> bytes:
    """What a client sends to ask that."""
    kind = request.kind
    parts = [bytes([kind])]
    if kind in _KEYS:
        parts.append(number(len(request.keys)))
    values = _VALUES_OF_A_KEY.get(kind, 0)
    for place, key in enumerate(request.keys):
        parts.append(text(key))
        parts += map(text, request.values[place * values : (place + 1) * values])
    if kind in _NUMBER:
        parts.append(struct.pack(_NUMBER[kind], request.number))
    return b''.join(parts)


async def read_answer(request: Request, reader: StreamReader, begun: bytes) -> bytes:
    """What a store has answered, as it stands.

    Args:
        request: what it was asked.
        reader: reads from the store.
        begun: its first byte.

    Raises:
        EOFError: the store is gone.
        ValueError: it does not speak as known here.
    """
    left = _HEAD_BYTES.get(request.kind, 8) - len(begun)
    head = begun + await reader.readexactly(left) if left else begun
    match request.kind:
        case Kind.GET | Kind.COMPARE_SET:
            return head + await reader.readexactly(_length(head, _MOST_BYTES))
        case Kind.MULTI_GET:
            first = head + await reader.readexactly(_length(head, _MOST_BYTES))
            return first + await _texts(reader, len(request.keys) - 1)
        case Kind.LIST_KEYS:
            return head + await _texts(reader, _length(head, _MOST_KEYS))
    return head


def sign_of_life(ping: Request) -> bytes:
    """The answer to a ping."""
    return struct.pack(_NUMBER[Kind.PING], ping.number)


def number(value: int) -> bytes:
    """A counter, or how many there are."""
    return struct.pack('<q', value)


def number_in(answer: bytes) -> int:
    """The counter of an answer."""
    (found,) = struct.unpack('<q', answer)
    return int(found)


def text(value: bytes) -> bytes:
    """A key or value."""
    return struct.pack('<Q', len(value)) + value


def shares(numbers: Sequence[int], result: int) -> list[int]:
    """What each would have been answered who adds a number, one after the other.

    Args:
        numbers: that were added together.
        result: the counter then.
    """
    found = []
    for value in reversed(numbers):
        found.append(result)
        result -= value
    return found[::-1]


async def _number(reader: StreamReader, form: str) -> int:
    (found,) = struct.unpack(form, await reader.readexactly(struct.calcsize(form)))
    return int(found)


async def _count(reader: StreamReader, limit: int) -> int:
    return _length(await reader.readexactly(8), limit)


async def _text(reader: StreamReader) -> bytes:
    return await reader.readexactly(await _count(reader, _MOST_BYTES))


async def _texts(reader: StreamReader, count: int) -> bytes:
    return b''.join([text(await _text(reader)) for _ in range(count)])


def _length(head: bytes, limit: int) -> int:
    (found,) = struct.unpack('<Q', head)
    if found > limit:
        raise ValueError(f'a length of {found} is beyond what a store and its clients send')
    return int(found)
