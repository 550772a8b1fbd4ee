# SPDX-License-Identifier: Apache-2.0
"""A window of one rank in the memory of its twin, a peer that captures the same bytes.

Twins have the same shard of weights and optimizer state, but differ in random numbers, counters of
the rank and amax histories. So the twin keeps a *stub* of each window: an ordinary window of few
bytes. Each slot of a stub holds the records that differ, and in its context the whole frame of the
owner's slot, with the checksums of all records. The other bytes come from the twin's own window of
the same name, the *base*. A stub is committed only if the checksums of these bytes match, so stub
and base together are bit for bit the window that the owner captured.
"""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec

from moevement_ext.memory.node_store import STUB, NodeStore
from moevement_ext.memory.window.file import SlotBlob, WindowFile
from moevement_ext.memory.window.format import Expected, check_whole, window_capacity
from moevement_ext.memory.window.name import StoredWindow, names_in
from moevement_ext.memory.window.refusal import CorruptWindow, OtherBytes, RefusedWindow
from moevement_ext.memory.window.slot import (
    RangeKey,
    Record,
    SlotHeader,
    align_up,
    decode_frame,
    encode_frame,
    frame_bytes_bound,
)

OwnParts = Collection[tuple[str, str]]
"""Tensor and part of the records in which twins may differ."""


def stub_of(file: WindowFile, slot: int, own_parts: OwnParts) -> SlotBlob:
    """Build the stub of a sealed slot: the records that the twin lacks.

    The window may be incomplete. `own_parts` are tensors and parts in which twins differ.
    """
    header, frame = file.header(slot), bytes(file.slot_blob(slot).frame)
    payload, content, records = file.payload(slot), bytearray(), []
    for record in header.records:
        if (record.tensor, record.part) in own_parts:
            records.append(msgspec.structs.replace(record, offset=len(content)))
            content += payload[record.offset : record.offset + record.nbytes].tobytes()
            content += bytes(align_up(len(content)) - len(content))
    stub = _stub_header(header, records, frame)
    return SlotBlob(memoryview(bytes(content)), memoryview(encode_frame(stub)))


def stub_window_bytes(file: WindowFile, own_parts: OwnParts) -> int:
    """Size of a file for the stub of a window; counts sealed slots only."""
    blobs = [stub_of(file, slot, own_parts) for slot in file.slots()]
    return window_capacity((len(blob.payload), len(blob.frame)) for blob in blobs)


def stub_capacity(largest: SlotHeader, own_parts: OwnParts, settings_bytes: int) -> int:
    """Size of a file for the stub of any window of a rank, with room for settings in slot 0.

    `largest` is a header with every record of the rank and the longest context.
    """
    own = [record for record in largest.records if (record.tensor, record.part) in own_parts]
    payload = sum(align_up(record.nbytes) for record in own)
    frame = frame_bytes_bound(_stub_header(largest, own, bytes(frame_bytes_bound(largest))))
    frames = ((payload, frame) for _ in range(largest.window))
    return window_capacity([(0, settings_bytes), *frames])


def owner_header(stub: SlotHeader, path: Path | str) -> SlotHeader:
    """Decode the owner's header in the header of its stub. Raises `CorruptWindow` without one."""
    try:
        header = decode_frame(stub.context)
        same = (header.owner, header.name, header.slot, header.window)
        if same != (stub.owner, stub.name, stub.slot, stub.window):
            raise ValueError(f'it is of rank {header.owner}, window {header.name}')
        return header
    except ValueError as error:
        raise CorruptWindow(f'slot {stub.slot} of a stub: {error}', path) from error


class TwinWindow:
    """A whole window, assembled from a stub and its base, both only read.

    Raises `RefusedWindow` if one of them is missing or damaged, or the base holds other bytes.
    """

    def __init__(self, stub: WindowFile, base: WindowFile) -> None:
        self.path = stub.path
        self._stub, self._base = stub, base
        self._stubs = {header.slot: header for header in stub.headers()}
        self._headers = {slot: owner_header(it, stub.path) for slot, it in self._stubs.items()}
        for slot, header in self._headers.items():
            _require_part(self._stubs[slot], header, stub.path)
            _require_same(header, base.header(slot), self._stubs[slot], stub.path)

    @classmethod
    def open(cls, path: Path) -> 'TwinWindow':
        """Map the stub at `path` (`NodeStore.stub_path`) and its base; errors as of the class."""
        return cls(WindowFile.open(path), WindowFile.open(base_path(path)))

    def verify_identity(self, expected: Expected) -> list[SlotHeader]:
        """Verify as `WindowFile.verify_identity`; returns the owner's headers."""
        headers = [header for _, header in sorted(self._headers.items())]
        check_whole(self.path, headers, expected)
        return headers

    def verify(self, expected: Expected) -> list[SlotHeader]:
        """Verify as `verify_identity`, and compare all payloads with their checksums."""
        headers = self.verify_identity(expected)
        self._stub.verify_payloads(self._stubs.values())
        self._base.verify_payloads(self._base.headers())
        return headers

    def pieces(self, slot: int) -> Iterator[memoryview]:
        """Frame and payload of a slot, the payload in views of both files."""
        yield memoryview(self._stubs[slot].context)
        base, stub = (memoryview(file.payload(slot)) for file in (self._base, self._stub))
        places = {_identity(record): record for record in self._headers[slot].records}
        sent = 0
        own = ((places[_identity(record)], record) for record in self._stubs[slot].records)
        for record, kept in sorted(own, key=lambda pair: pair[0].offset):
            yield base[sent : record.offset]
            yield stub[kept.offset : kept.offset + kept.nbytes]
            sent = record.offset + record.nbytes
        yield base[sent:]

    def record(self, slot: int, record: Record) -> memoryview:
        """Bytes of a record of the owner's slot, not verified."""
        for kept in self._stubs[slot].records:
            if _identity(kept) == _identity(record):
                return self._stub.record(slot, kept)
        return self._base.record(slot, record)


def base_path(stub: Path) -> Path:
    """Path of the base of a stub: the same file name, among the holder's own windows."""
    holder = stub.parent.parent
    return holder / holder.name / stub.name


def files_of(path: Path) -> list[Path]:
    """The files with the bytes of the window, or of the stub, at `path`."""
    return [path, base_path(path)] if path.parent.name.startswith(STUB) else [path]


Opener = Callable[[Path], WindowFile | TwinWindow]


def openers(store: NodeStore) -> Iterator[tuple[StoredWindow, Opener]]:
    """The windows in memory of this node, also stubs with a base, each with what opens it.

    Errors as of `NodeStore.scan`.
    """
    yield from ((stored, WindowFile.open) for stored in store.scan())
    for stub in store.scan_stubs():
        if stub.path.name in names_in(base_path(stub.path).parent):
            yield stub, TwinWindow.open


def _stub_header(header: SlotHeader, records: list[Record], frame: bytes) -> SlotHeader:
    return msgspec.structs.replace(
        header,
        payload_bytes=sum(align_up(record.nbytes) for record in records),
        records=records,
        context=frame,
        settings=b'',
    )


def _require_part(stub: SlotHeader, header: SlotHeader, path: Path) -> None:
    """Check that the stub has records of the owner's slot, unchanged except for their offset."""
    owned = {_identity(record): record for record in header.records}
    for record in stub.records:
        found = owned.get(_identity(record))
        if found is None or msgspec.structs.replace(record, offset=found.offset) != found:
            reason = f'slot {stub.slot} of a stub: its owner has no such record: {record.key}'
            raise CorruptWindow(reason, path)


def _require_same(header: SlotHeader, base: SlotHeader, stub: SlotHeader, path: Path) -> None:
    """Check that the base has all bytes of a slot that the stub lacks."""
    own = {_identity(record) for record in stub.records}
    theirs = {_identity(record): record for record in base.records}
    if (header.run, header.topology, header.name) != (base.run, base.topology, base.name):
        raise RefusedWindow('its base is of another run, layout or window', path)
    if header.payload_bytes != base.payload_bytes or len(theirs) != len(header.records):
        raise OtherBytes(f'slot {header.slot} has other records than that of its base', path)
    differing = [
        record
        for record in header.records
        if not _is_same(record, theirs.get(_identity(record)), _identity(record) in own)
    ]
    if differing:
        first, more = differing[0], len(differing) - 1
        raise OtherBytes(
            f'ranks {header.owner} and {base.owner} do not hold the same after iteration '
            f'{header.iteration}: operator {first.operator}, tensor {first.tensor}, part '
            f'{first.part}' + (f', and {more} more' if more else '')
        )


def _is_same(record: Record, found: Record | None, is_own: bool) -> bool:
    """True if both have the same offset and, unless `is_own`, the same checksum."""
    if found is None or found.offset != record.offset:
        return False
    return is_own or found.checksum == record.checksum


def _identity(record: Record) -> tuple[RangeKey, int]:
    return record.key, record.nbytes
