# SPDX-License-Identifier: Apache-2.0
"""The protocol between torch's `TCPStore` and its clients.

Numbers are little-endian; a key or value is its length and its bytes; all keys begin with a slash,
which is part of the key here. The protocol is private to torch: it was checked against torch 2.11
to 2.15, and the tests check the installed version.
"""

import struct
from collections.abc import Callable, Generator
from enum import IntEnum
from typing import Any

import msgspec

MAGIC = 0x3C85F7CE
ARRIVED, CANCELLED = b'\0', b'\1'
# Maximum bytes of a key or value; torch's server has the same limit.
_MOST_BYTES = 8 << 20
_MOST_KEYS, _MOST_KEYS_ASKED = 1 << 20, 1 << 16
MOST_BYTES_ASKED = 16 << 20
"""Maximum bytes of all keys and values of one request."""


class Kind(IntEnum):
    """Kinds of requests."""

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
# Format of the number in a request or its answer, by kind.
_NUMBER = {Kind.VALIDATE: '<I', Kind.PING: '<I', Kind.ADD: '<q'}
# Kinds that begin with the number of keys.
_KEYS = {Kind.CHECK, Kind.WAIT, Kind.MULTI_GET, Kind.MULTI_SET}
_VALUES_OF_A_KEY = {Kind.SET: 1, Kind.APPEND: 1, Kind.COMPARE_SET: 2, Kind.MULTI_SET: 1}
_ONE_KEY = {Kind.SET, Kind.COMPARE_SET, Kind.GET, Kind.ADD, Kind.DELETE_KEY, Kind.APPEND}
# Bytes of the head of an answer; 8 for other kinds.
_HEAD_BYTES = {Kind.CHECK: 1, Kind.WAIT: 1, Kind.PING: 4}


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request of a client."""

    kind: Kind
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    """Values of the first key, of the second key, and so on."""
    number: int = 0
    """Number to add, or to return in an answer to a ping."""


type Reading[T] = Generator[int, bytes, T]
"""A parser: yields the number of bytes that it needs, is sent them, and returns the result."""


class Incoming:
    """Received bytes of a connection that are not parsed yet.

    An incomplete message is parsed further when more bytes arrive, not from its beginning.
    """

    def __init__(self) -> None:
        self._content = bytearray()
        self._at = 0
        self._reading: Reading[Any] | None = None
        self._wanted = 0

    def add(self, data: bytes) -> None:
        del self._content[: self._at]
        self._at = 0
        self._content += data

    def __len__(self) -> int:
        return len(self._content) - self._at

    def whole[T](self, read: Callable[[], Reading[T]]) -> T | None:
        """The result of `read`; None if the message is incomplete. Raises what `read` raises."""
        if self._reading is None:
            self._reading = read()
            self._wanted = next(self._reading)
        while self._wanted <= len(self):
            begin, self._at = self._at, self._at + self._wanted
            try:
                self._wanted = self._reading.send(bytes(self._content[begin : self._at]))
            except StopIteration as done:
                self._reading = None
                found: T = done.value
                return found
        return None


def read_request() -> Reading[Request]:
    """Read the next request.

    Raises `ValueError` if it is no request to a store, comes from an unknown version of torch, or
    is longer than the limits.
    """
    kind = Kind((yield 1)[0])
    count = _length((yield 8), _MOST_KEYS_ASKED) if kind in _KEYS else int(kind in _ONE_KEY)
    values_of_a_key = _VALUES_OF_A_KEY.get(kind, 0)
    keys: list[bytes] = []
    values: list[bytes] = []
    left = MOST_BYTES_ASKED
    for _ in range(count):
        for place in range(1 + values_of_a_key):
            found = yield from _text(min(left, _MOST_BYTES))
            left -= len(found)
            (values if place else keys).append(found)
    number = (yield from _number(_NUMBER[kind])) if kind in _NUMBER else 0
    return Request(kind, tuple(keys), tuple(values), number)


def encoded(request: Request) -> bytes:
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


def read_answer(request: Request) -> Reading[bytes]:
    """Read the store's answer to `request`, undecoded; `ValueError` if it violates the protocol."""
    head = yield _HEAD_BYTES.get(request.kind, 8)
    match request.kind:
        case Kind.GET | Kind.COMPARE_SET:
            return head + (yield _length(head, _MOST_BYTES))
        case Kind.MULTI_GET:
            first = head + (yield _length(head, _MOST_BYTES))
            return first + (yield from _texts(len(request.keys) - 1))
        case Kind.LIST_KEYS:
            return head + (yield from _texts(_length(head, _MOST_KEYS)))
    return head


def heartbeat(ping: Request) -> bytes:
    return struct.pack(_NUMBER[Kind.PING], ping.number)


def number(value: int) -> bytes:
    """Encode a counter, or a number of items."""
    return struct.pack('<q', value)


def number_in(answer: bytes) -> int:
    (found,) = struct.unpack('<q', answer)
    return int(found)


def text(value: bytes) -> bytes:
    return struct.pack('<Q', len(value)) + value


def _number(form: str) -> Reading[int]:
    (found,) = struct.unpack(form, (yield struct.calcsize(form)))
    return int(found)


def _text(limit: int) -> Reading[bytes]:
    return (yield _length((yield 8), limit))


def _texts(count: int) -> Reading[bytes]:
    found = []
    for _ in range(count):
        found.append(text((yield from _text(_MOST_BYTES))))
    return b''.join(found)


def _length(head: bytes, limit: int) -> int:
    (found,) = struct.unpack('<Q', head)
    if found > limit:
        raise ValueError(f'a length of {found} is beyond what a store and its clients send')
    return int(found)
