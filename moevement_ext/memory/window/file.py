# SPDX-License-Identifier: Apache-2.0
"""One window of one owner in one preallocated, mapped file (see `window.format`).

A slot is its payload followed by the frame of its header. The frame is placed when the slot is
sealed, so that its size need not be known when the payload is reserved. Readers trust no byte: any
damage raises a `RefusedWindow` (invariant I7).
"""

import enum
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.mapped_file import (
    Bytes,
    in_pages,
    map_anew,
    map_existing,
    map_new,
    release_range,
    reserve_range,
)
from moevement_ext.memory.private_file import ForeignFileError
from moevement_ext.memory.window.format import (
    MAX_SLOTS,
    PREAMBLE_BYTES,
    Directory,
    Entry,
    Expected,
    check_layout,
    check_whole,
    damaged,
    encode_directory,
    read_directory,
    verified_header,
)
from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.refusal import CorruptWindow, TruncatedWindow, unopened
from moevement_ext.memory.window.slot import (
    ALIGNMENT,
    Kept,
    Record,
    SlotHeader,
    align_up,
    decode_frame,
    encode_frame,
)

PIECE_BYTES = 2**18
"""Size of a piece of a payload that is received at a time; fits in the cache of a CPU core."""


class FileTooSmall(HostMemoryError):
    """A window does not fit in the file that was begun for it; it needs `needed` bytes."""

    def __init__(self, path: Path, needed: int) -> None:
        super().__init__(f'{path}: the window needs {needed} bytes; its file is smaller')
        self.needed = needed


class SlotBlob(NamedTuple):
    """A sealed slot as it travels to a replica: views of the mapped file, not copies."""

    payload: memoryview
    frame: memoryview


class FileState(enum.Enum):
    """State of a file."""

    FREE = 'free'
    WRITING = 'writing'
    COMMITTED = 'committed'
    CUT_OFF = 'cut off'
    """Left incomplete by an earlier process: free, but recoveries compare with it until it is
    reused."""


class WindowFile:
    """A window file mapped once for the lifetime of the object.

    One thread begins and reserves; another may seal, which computes the checksums. A lock
    guards the directory. After `freeze` no byte changes until the next `begin`.

    Attributes:
        path: changes when the store renames the file.
        array: uint8 view over the whole map, e.g. to wrap in a tensor and register as pinned.
        room: bytes with pages, from the beginning: the size of windows of the length in force.
            The rest of the file is a hole.
        kept: byte ranges shared with an earlier window, if they are known.
        state: set by the `OwnerWindows` that recycles the file.
        held: `OwnerWindows.hold` protects the file; False once a rollback has freed it
            nevertheless, so that its bytes may change.
        fetched: a thread that may be abandoned still fills the file, even if its window is
            discarded.
    """

    def __init__(
        self, path: Path, array: Bytes, directory: Directory, room: int | None = None
    ) -> None:
        self.path = path
        self.array = array
        self.room = array.size if room is None else room
        self.kept: Kept | None = None
        self.state = FileState.FREE
        self.held = self.fetched = False
        self._making_room = threading.Lock()
        self._directory = directory
        # Offset and bytes of the payloads reserved, by slot; None: not open for writing.
        self._reserved: dict[int, tuple[int, int]] | None = None
        self._tail = PREAMBLE_BYTES  # end of the used part
        # Slots of the window; None until a header of it is written or read.
        self._length: int | None = None
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls, path: Path, capacity: int, room: int | None = None, reuse: bool = False
    ) -> 'WindowFile':
        """Create an empty file of `capacity` bytes, the first `room` (None: all) with pages.

        With `reuse` an existing file gives its space, and loses its content; a `ForeignFileError`
        if other users may have it open. Raises `HostMemoryError` without space, and leaves no file.
        """
        if capacity < PREAMBLE_BYTES:
            raise ValueError(f'a window file needs at least {PREAMBLE_BYTES} bytes, not {capacity}')
        room = capacity if room is None else min(room, capacity)
        mapped = (map_anew if reuse else map_new)(path, capacity, room)
        file = cls(path, np.frombuffer(mapped, np.uint8), Directory(), room)
        file._write_directory(Directory())
        return file

    @classmethod
    def open(cls, path: Path, writable: bool = False, room: int | None = None) -> 'WindowFile':
        """Map an existing window; frames and payloads are read later, by `verify`.

        If `writable`, `begin` can recycle the file later; it gets `room` bytes with pages
        if the window takes less (None: all), or raises `HostMemoryError`. Raises a `RefusedWindow`,
        typed by reason, unless it is a readable, whole window file of this version.
        """
        try:
            array = np.frombuffer(map_existing(path, writable, PREAMBLE_BYTES), np.uint8)
        except ValueError as error:
            raise TruncatedWindow(str(error), path) from error
        except (OSError, ForeignFileError) as error:
            raise unopened(path, error) from error
        file = cls(path, array, read_directory(path, array, array.size))
        if writable:
            # If this fails, pages of the window stay as they are: a recovery may need them.
            file.room = file.used_bytes()
            reserve_range(array, path, 0, file.room)
            file.make_room(file.capacity if room is None else room)
            release_range(array, file.room, array.size)
        return file

    def make_room(self, nbytes: int) -> None:
        """Reserve pages for the first `nbytes`, at most all, else `HostMemoryError`. Any thread."""
        with self._making_room:
            if (wanted := min(nbytes, self.capacity)) > self.room:
                try:
                    reserve_range(self.array, self.path, self.room, wanted)
                except HostMemoryError:
                    release_range(self.array, self.room, self.capacity)
                    raise
                self.room = wanted

    def give_back(self, room: int) -> None:
        """Free pages after the first `room` bytes of a file whose content has no value. Any thread.

        A reader that still has the file open finds zeros there, which no checksum matches.
        """
        with self._making_room:
            if room < self.room:
                release_range(self.array, room, self.capacity)
                self.room = room

    @property
    def capacity(self) -> int:
        return self.array.size

    @property
    def name(self) -> WindowName | None:
        """The window in this file, complete or being written; None when empty."""
        return self._directory.name

    @property
    def start(self) -> int:
        """First iteration of the window in this file; -1 when empty."""
        return -1 if self.name is None else self.name.start

    def required_name(self) -> WindowName:
        """Name of the window in this file; `ValueError` if the file is empty."""
        if self.name is None:
            raise ValueError(f'{self.path} holds no window')
        return self.name

    def rename(self, path: Path) -> None:
        """Rename atomically within the file system."""
        os.rename(self.path, path)
        self.path = path

    # Writing

    def begin(self, name: WindowName) -> None:
        with self._lock:
            self.kept = None
            self._reserved, self._tail = {}, PREAMBLE_BYTES
            self._length = None
            self._write_directory(Directory(name))

    def require(self, content_bytes: int, slots: int) -> None:
        """Raise `FileTooSmall` if payloads and frames of `content_bytes` cannot fit."""
        if PREAMBLE_BYTES + content_bytes > self.capacity:
            raise FileTooSmall(self.path, PREAMBLE_BYTES + content_bytes + 2 * slots * ALIGNMENT)

    def freeze(self) -> None:
        """Forbid further writes; called when the window is committed."""
        with self._lock:
            self._reserved = None

    def reserve_slot(self, slot: int, payload_bytes: int) -> Bytes:
        """Reserve a slot's payload: a view of the map, 64-byte aligned, shape [payload_bytes].

        A slot that is reserved but not sealed (after a broken transfer) gets the same place
        again. Raises `HostMemoryError` if the file is too small.
        """
        with self._lock:
            reserved = self._writing()
            if not 0 <= slot < MAX_SLOTS:
                raise ValueError(f'{self.path}: slot {slot} is not in [0, {MAX_SLOTS})')
            if self._entry(slot) is not None:
                raise ValueError(f'{self.path}: slot {slot} is already sealed')
            if slot not in reserved:
                reserved[slot] = self._take(payload_bytes), payload_bytes
            offset, nbytes = reserved[slot]
            if nbytes != payload_bytes:
                raise ValueError(
                    f'{self.path}: slot {slot} was reserved with {nbytes} bytes, '
                    f'not {payload_bytes}'
                )
            return self.array[offset : offset + payload_bytes]

    def seal_slot(self, header: SlotHeader) -> SlotHeader:
        """Enter a filled slot in the directory; returns the header with its checksums.

        Called on a worker thread, as it reads the whole payload.
        """
        with self._lock:
            offset, size = self._place_of(header.slot)
        check_layout(header, self.name, size)
        payload = self.array[offset : offset + size]
        records = [
            msgspec.structs.replace(record, checksum=_checksum(payload, record))
            for record in header.records
        ]
        sealed = msgspec.structs.replace(header, records=records)
        self._enter(header, encode_frame(sealed))
        return sealed

    def write_blob(
        self,
        slot: int,
        payload_bytes: int,
        frame: bytes | memoryview,
        fill: Callable[[memoryview], None],
    ) -> SlotHeader:
        """Write a slot that another process sealed, byte for byte.

        Calls `fill` with consecutive pieces of the place of the payload, even if the frame is
        damaged; it fills each completely or raises, after which the slot can be written again.
        Raises `CorruptWindow` if the frame is damaged or another slot's, or a record differs from
        its checksum; `HostMemoryError` if the file is too small.
        """
        payload = memoryview(self.reserve_slot(slot, payload_bytes))
        try:
            header = decode_frame(frame)
            check_layout(header, self.name, payload_bytes)
            if header.slot != slot:
                raise ValueError(f'the header is that of slot {header.slot}')
        except ValueError as error:
            fill(payload)
            raise CorruptWindow(f'slot {slot}: {error}', self.path) from error
        bad = _fill(payload, header.records, fill)
        if bad is not None:
            raise damaged(self.path, slot, bad)
        self._enter(header, bytes(frame))
        return header

    def _writing(self) -> dict[int, tuple[int, int]]:
        if self._reserved is None:
            raise ValueError(f'{self.path} is not open for writing; a committed window is final')
        return self._reserved

    def _place_of(self, slot: int) -> tuple[int, int]:
        reserved = self._writing()
        if slot not in reserved:
            raise ValueError(f'{self.path}: slot {slot} is sealed without having been reserved')
        return reserved[slot]

    def _take(self, nbytes: int) -> int:
        offset = self._tail
        if offset + nbytes > self.capacity:
            raise HostMemoryError(
                f'{self.path}: {nbytes} bytes more at offset {offset} exceed the capacity of '
                f'{self.capacity} bytes; the plan and the size of the window files disagree'
            )
        if offset + nbytes > in_pages(self.room):
            self.make_room(offset + nbytes)
        self._tail = align_up(offset + nbytes)
        return offset

    def _enter(self, header: SlotHeader, frame: bytes) -> None:
        slot = header.slot
        with self._lock:
            payload_offset, payload_bytes = self._place_of(slot)
            at = self._take(len(frame))
            self.array[at : at + len(frame)] = np.frombuffer(frame, np.uint8)
            entry = Entry(
                slot=slot,
                payload_offset=payload_offset,
                payload_bytes=payload_bytes,
                frame_offset=at,
                frame_bytes=len(frame),
            )
            self._write_directory(Directory(self.name, [*self._directory.entries, entry]))
            self._length = header.window
            del self._writing()[slot]

    def _write_directory(self, directory: Directory) -> None:
        used = encode_directory(self.path, self.capacity, directory)
        self.array[: len(used)] = np.frombuffer(used, np.uint8)
        self._directory = directory

    # Reading

    def slots(self) -> list[int]:
        """Sealed slots in ascending order."""
        return sorted(entry.slot for entry in self._directory.entries)

    def length(self) -> int:
        """Slots of the window when it is complete; at least one is sealed. Errors as in `header`.

        A header can have MiB of records, so it is decoded only for a file that was just opened.
        """
        if self._length is None:
            self._length = self.header(min(self.slots(), default=0)).window
        return self._length

    def used_bytes(self) -> int:
        """Bytes from the beginning of the file to the end of its last slot."""
        ends = (entry.frame_offset + entry.frame_bytes for entry in self._directory.entries)
        return max(ends, default=PREAMBLE_BYTES)

    def header(self, slot: int) -> SlotHeader:
        """Verified header of a slot; errors as of `verified_header`, also if it is not sealed."""
        entry = self._sealed(slot)
        return verified_header(self.path, self.name, entry, self.slot_blob(slot).frame)

    def headers(self) -> list[SlotHeader]:
        """Headers of all sealed slots, slot 0 first; errors as in `header`."""
        return [self.header(slot) for slot in self.slots()]

    def payload(self, slot: int) -> Bytes:
        """View of the payload of a sealed slot, shape [payload bytes], not verified."""
        entry = self._sealed(slot)
        return self.array[entry.payload_offset : entry.payload_offset + entry.payload_bytes]

    def record(self, slot: int, record: Record) -> memoryview:
        """Bytes of a record of a sealed slot, not verified."""
        return memoryview(self.payload(slot))[record.offset : record.offset + record.nbytes]

    def pieces(self, slot: int) -> Iterator[memoryview]:
        """Frame and payload of a sealed slot."""
        yield from reversed(self.slot_blob(slot))

    def slot_blob(self, slot: int) -> SlotBlob:
        """Payload and frame of a sealed slot for replication, without copying."""
        entry = self._sealed(slot)
        frame = self.array[entry.frame_offset : entry.frame_offset + entry.frame_bytes]
        return SlotBlob(memoryview(self.payload(slot)), memoryview(frame))

    def verify(self, expected: Expected) -> list[SlotHeader]:
        """Verify that the window is whole, undamaged and the expected one; headers, slot 0 first.

        Raises a `RefusedWindow` typed by the reason, with file, slot and, if applicable, tensor.
        """
        headers = self.verify_identity(expected)
        self.verify_payloads(headers)
        return headers

    def verify_identity(self, expected: Expected) -> list[SlotHeader]:
        """Verify as `verify`, without reading payloads."""
        headers = self.headers()
        check_whole(self.path, headers, expected)
        return headers

    def verify_payloads(self, headers: Iterable[SlotHeader]) -> None:
        """Compare all records with their checksums; `CorruptWindow` names the first bad one."""
        for header in headers:
            payload = self.payload(header.slot)
            for record in header.records:
                if _checksum(payload, record) != record.checksum:
                    raise damaged(self.path, header.slot, record)

    def _entry(self, slot: int) -> Entry | None:
        return next((entry for entry in self._directory.entries if entry.slot == slot), None)

    def _sealed(self, slot: int) -> Entry:
        entry = self._entry(slot)
        if entry is None:
            raise TruncatedWindow(f'has no sealed slot {slot}', self.path)
        return entry


def _fill(
    payload: memoryview, records: Iterable[Record], fill: Callable[[memoryview], None]
) -> Record | None:
    """Fill a payload completely; returns a record that differs from its checksum, if any.

    The checksum of a piece is computed while the piece is in the cache of the CPU, which is faster
    than a second pass. Records of damaged frames may overlap.
    """
    at, bad = 0, None
    for record in sorted(records, key=lambda record: record.offset):
        digest, end = xxhash.xxh3_64(), record.offset + record.nbytes
        for begin in range(record.offset, end, PIECE_BYTES):
            piece_end = min(begin + PIECE_BYTES, end)
            if piece_end > at:
                filled = min(max(piece_end, at + PIECE_BYTES), len(payload))
                fill(payload[at:filled])
                at = filled
            digest.update(payload[begin:piece_end])
        if digest.intdigest() != record.checksum and bad is None:
            bad = record
    fill(payload[at:])
    return bad


def _checksum(payload: Bytes, record: Record) -> int:
    data = payload[record.offset : record.offset + record.nbytes]
    return xxhash.xxh3_64_intdigest(memoryview(data))
