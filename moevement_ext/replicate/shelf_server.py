# SPDX-License-Identifier: Apache-2.0
"""Serves windows of other layouts on this node: their headers, and ranges of records."""

import xxhash

from moevement_ext.memory.shelf import Shelf
from moevement_ext.memory.window.slot import encode_frame
from moevement_ext.replicate.connection import Connection
from moevement_ext.replicate.protocol import (
    Ack,
    FetchPart,
    FetchRanges,
    RangesHead,
    SlotHead,
    WindowHead,
)


def answer(
    connection: Connection, shelf: Shelf | None, request: FetchPart | FetchRanges, timeout_s: float
) -> None:
    """Answer one request. Thread of the connection.

    Raises:
        RefusedWindow: no copy here is undamaged.
        ValueError: no other layouts are served here, or there is no such range.
    """
    if shelf is None:
        raise ValueError('windows of other layouts are not served here')
    if isinstance(request, FetchPart):
        _send_headers(connection, shelf, request, timeout_s)
    else:
        _send_ranges(connection, shelf, request, timeout_s)


def _send_headers(
    connection: Connection, shelf: Shelf, request: FetchPart, timeout_s: float
) -> None:
    frames = [(header.slot, encode_frame(header)) for header in shelf.headers(request.part)]
    nbytes = sum(len(frame) for _, frame in frames)
    connection.set_deadline(timeout_s, nbytes)
    connection.send(WindowHead(len(frames), nbytes))
    for slot, frame in frames:
        connection.send(SlotHead(slot, 0, len(frame)))
        connection.send_bytes(frame)
    connection.send(Ack())


def _send_ranges(
    connection: Connection, shelf: Shelf, request: FetchRanges, timeout_s: float
) -> None:
    headers = shelf.headers(request.part)
    if request.slot >= len(headers):
        raise ValueError(f'there is no slot {request.slot}')
    pieces = []
    for index, begin, end in request.ranges:
        if index >= len(headers[request.slot].records):
            raise ValueError(f'there is no record {index}')
        record = shelf.read(request.part, request.slot, index)
        if not begin <= end <= len(record):
            raise ValueError(f'record {index} has {len(record)} bytes, not {begin} to {end}')
        pieces.append(record[begin:end])
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    nbytes = sum(map(len, pieces))
    connection.set_deadline(timeout_s, nbytes)
    connection.send(RangesHead(nbytes, digest.intdigest()))
    for piece in pieces:
        connection.send_bytes(piece)
