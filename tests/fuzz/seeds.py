# SPDX-License-Identifier: Apache-2.0
"""Valid inputs of each target, from which mutations start."""

import struct

import msgspec

from moevement_ext.membership import exchange
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.upstream_log.record import Direction, LoggedTensor, LogKey
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Directory, Entry, encode_directory
from moevement_ext.memory.window.name import Agreed
from moevement_ext.memory.window.slot import encode_frame, frame_checksum
from moevement_ext.replicate.protocol import (
    Ack,
    CommitWindow,
    DiscardAfter,
    FetchHeaders,
    FetchLedger,
    FetchLog,
    FetchWindow,
    LedgerEntries,
    LogHead,
    NotYet,
    Proceed,
    PutSlot,
    Refused,
    SlotHead,
    WindowHead,
)
from tests.unit.memory.samples import WINDOW, named


def message(struct_: msgspec.Struct) -> bytes:
    encoded = msgspec.msgpack.encode(struct_)
    return struct.pack('<I', len(encoded)) + encoded


def seeds(file: WindowFile) -> dict[str, list[bytes]]:
    """Valid inputs by target.

    Args:
        file: a complete window.
    """
    entries = [
        Entry(
            slot=slot,
            payload_offset=2**16 + 64,
            payload_bytes=64,
            frame_offset=2**16,
            frame_bytes=64,
        )
        for slot in range(WINDOW)
    ]
    directory = Directory(named(), entries)
    frames = [encode_frame(header)[8:] for header in file.headers()]
    entry = LedgerEntry(3, [1.5], [False], 4, 32)
    return {
        'window': [
            file.array[:1024].tobytes(),
            encode_directory(file.path, file.capacity, directory),
        ],
        'directory': [msgspec.msgpack.encode(file._directory), msgspec.msgpack.encode(directory)],
        'frame': frames,
        'ledger': [msgspec.msgpack.encode(entry)],
        'server': [b'\1' + data for data in _requests(file)] + [b'\0' + _requests(file)[0]],
        'client': _replies(file),
        'packed': [exchange.packed(b'a report' * times) for times in (0, 1, 100)],
    }


def _requests(file: WindowFile) -> list[bytes]:
    put = b''
    for slot in file.slots():
        payload, frame = file.slot_blob(slot)
        checksum = frame_checksum(frame)
        head = PutSlot(0, named(), slot, len(payload), len(frame), checksum, Agreed(named(), (3,)))
        put += message(head) + bytes(payload) + bytes(frame)
    return [
        put,
        message(CommitWindow(0, named())) + message(DiscardAfter(0, 3)),
        message(FetchHeaders(0, -1)) + message(FetchWindow(0, named())),
        message(FetchLog(LogKey(1, Direction.UP, 0))),
        message(FetchLedger(3, 2**62)),
    ]


def _replies(file: WindowFile) -> list[bytes]:
    window = headers = message(WindowHead(WINDOW, file.capacity))
    for slot in file.slots():
        payload, frame = file.slot_blob(slot)
        headers += message(SlotHead(slot, 0, len(frame))) + bytes(frame)
        window += message(SlotHead(slot, len(payload), len(frame))) + bytes(payload) + bytes(frame)
    tensor = LoggedTensor('float32', (2,), 8, 0)
    return [
        b'\0' + headers + message(Ack()),
        b'\1' + window + message(Ack()),
        b'\1' + message(WindowHead(2**62, 2**63)) + message(SlotHead(2**40, 2**63, 64)),
        b'\2' + message(LogHead(tensor)) + bytes(8),
        b'\2' + message(LogHead(LoggedTensor('uint8', (2**62,), 2**62, 0))),
        b'\2' + message(NotYet()),
        b'\3' + message(LedgerEntries([LedgerEntry(3, [1.5], [False], 4, 32)])),
        b'\4' + message(Proceed()) + message(Ack()),
        b'\4' + message(Refused('no')),
    ]
