# SPDX-License-Identifier: Apache-2.0
"""Byte format of a window file, and the checks of a window before its payloads are read.

The preamble has a fixed size: magic, version, checksum, capacity, then the directory of the slots.
The slots follow, each a payload and the frame of its header (`slot.encode_frame`). Readers check
every offset against the file before they use it.
"""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import xxhash

from moevement_ext.memory.mapped_file import Bytes
from moevement_ext.memory.window.name import Count, RankIdentity, WindowName
from moevement_ext.memory.window.refusal import (
    CorruptWindow,
    OtherSettings,
    TruncatedWindow,
    UnknownVersion,
    WrongWindow,
)
from moevement_ext.memory.window.settings import (
    Differences,
    RunSettings,
    decode,
    differences,
    first_lines,
)
from moevement_ext.memory.window.slot import (
    ALIGNMENT,
    FORMAT_VERSION,
    Record,
    SlotHeader,
    align_up,
    decode_frame,
)

PREAMBLE_BYTES = 64 * 1024
MAX_SLOTS = 1024

_MAGIC = b'MoEvWin\0'
_PREAMBLE = struct.Struct('<8sIIQQ')  # magic, version, directory bytes, capacity, checksum
_CHECKED = struct.Struct('<IIQ')  # the fields the checksum covers besides the directory

GENERATIONS = 2
"""Files for the windows of one owner: one for the newest persisted window, one for the window that
is captured or received. A file becomes free when its successor is persisted; until then no window
begins (see `protect.lifecycle`)."""
IDENTITY = {
    'run': OtherSettings,
    'topology': OtherSettings,
    'owner': WrongWindow,
    'start': WrongWindow,
    'plan': WrongWindow,
}
"""Header fields that are equal in all slots of a window, with the error for other values."""


class Entry(msgspec.Struct, kw_only=True, frozen=True, array_like=True):
    """Place of one sealed slot in the file, in bytes from its beginning."""

    slot: Count
    payload_offset: Count
    payload_bytes: Count
    frame_offset: Count
    frame_bytes: Count


class Directory(msgspec.Struct, frozen=True, array_like=True):
    """Name of the window in a file, and its slots in the order in which they were sealed."""

    name: WindowName | None = None
    entries: list[Entry] = []


_DIRECTORY = msgspec.msgpack.Decoder(Directory)


def window_capacity(slots: Iterable[tuple[int, int]]) -> int:
    """Bytes of a window file for slots of (payload, `slot.frame_bytes_bound`) bytes each."""
    return PREAMBLE_BYTES + sum(align_up(payload) + align_up(frame) for payload, frame in slots)


def encode_directory(path: Path, capacity: int, directory: Directory) -> bytes:
    """Used part of a preamble, for a file of `capacity` bytes; `ValueError`: too many slots."""
    encoded = msgspec.msgpack.encode(directory)
    checksum = _preamble_checksum(FORMAT_VERSION, capacity, encoded)
    used = _PREAMBLE.pack(_MAGIC, FORMAT_VERSION, len(encoded), capacity, checksum) + encoded
    if len(used) > PREAMBLE_BYTES:
        raise ValueError(f'{path}: directory of {len(encoded)} bytes exceeds the preamble')
    return used


def read_directory(path: Path, preamble: Bytes, size: int) -> Directory:
    """Decode the directory of a file of `size` bytes after checking all of its preamble.

    `preamble` is at least the first `PREAMBLE_BYTES` bytes, or fewer if the file is shorter.

    Raises:
        RefusedWindow: not a readable, whole window file of this version (typed by the reason).
    """
    if min(size, preamble.size) < PREAMBLE_BYTES:
        raise TruncatedWindow(f'{size} bytes, less than the preamble', path)
    magic, version, length, capacity, checksum = _PREAMBLE.unpack_from(preamble)
    if magic != _MAGIC:
        raise CorruptWindow('not a window file', path)
    if version != FORMAT_VERSION:
        raise unknown_version(path, version)
    if length > PREAMBLE_BYTES - _PREAMBLE.size:
        raise CorruptWindow(f'impossible directory of {length} bytes', path)
    encoded = preamble[_PREAMBLE.size : _PREAMBLE.size + length].tobytes()
    if _preamble_checksum(version, capacity, encoded) != checksum:
        raise CorruptWindow('checksum of the directory does not match', path)
    if size < capacity:
        raise TruncatedWindow(f'{size} of {capacity} bytes', path)
    try:
        directory = _DIRECTORY.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptWindow(f'directory cannot be decoded: {error}', path) from error
    _check_entries(path, size, directory)
    return directory


def check_layout(header: SlotHeader, name: WindowName | None, payload_bytes: int) -> None:
    """Check that a header is consistent with itself, its file (begun for `name`) and its payload.

    Raises `ValueError` otherwise; the message says how.
    """
    if header.name != name:
        raise ValueError(f'header of window {header.name} in a file of {name}')
    if header.payload_bytes != payload_bytes:
        raise ValueError(f'payload has {payload_bytes} bytes, header says {header.payload_bytes}')
    if not header.slot < header.window or header.iteration != header.start + header.slot:
        raise ValueError(
            f'iteration {header.iteration} does not belong in slot {header.slot} of the window '
            f'of {header.window} from {header.start}'
        )
    for record in header.records:
        if record.offset % ALIGNMENT or record.offset + record.nbytes > payload_bytes:
            raise ValueError(
                f'operator {record.operator}, tensor {record.tensor}, part {record.part}: '
                f'{record.nbytes} bytes at {record.offset} are not aligned within the '
                f'{payload_bytes} bytes of the payload'
            )


def unknown_version(path: Path, version: int) -> UnknownVersion:
    reads = f'format version {version}, this program reads {FORMAT_VERSION}'
    return UnknownVersion(f'{reads}; it was written by another release', path)


def _preamble_checksum(version: int, capacity: int, directory: bytes) -> int:
    checked = _CHECKED.pack(version, len(directory), capacity)
    return xxhash.xxh3_64_intdigest(checked + directory)


def _check_entries(path: Path, size: int, directory: Directory) -> None:
    slots = [entry.slot for entry in directory.entries]
    if len(set(slots)) != len(slots):
        raise CorruptWindow(f'a slot is listed twice: {slots}', path)
    for entry in directory.entries:
        ends = (entry.payload_offset + entry.payload_bytes, entry.frame_offset + entry.frame_bytes)
        if min(entry.payload_offset, entry.frame_offset) < PREAMBLE_BYTES or max(ends) > size:
            raise CorruptWindow(f'slot {entry.slot} lies outside of the file', path)


class Expected(NamedTuple):
    """Required header fields of every slot; None accepts any value."""

    run: str | None = None
    topology: str | None = None
    owner: int | None = None
    name: WindowName | None = None
    settings: RunSettings | None = None

    @classmethod
    def of(cls, identity: RankIdentity, name: WindowName | None = None) -> Self:
        """Require a window that this rank itself captured."""
        return cls(identity.run, identity.topology, identity.rank, name, identity.settings)

    def check(self, header: SlotHeader, path: Path) -> None:
        """Compare with the header of a slot; raises a `RefusedWindow` typed by the difference."""
        window = (None, None) if self.name is None else (self.name.start, self.name.plan)
        wanted = (self.run, self.topology, self.owner, *window)
        known = self.differs(header).decisive
        for (field, refusal), expected in zip(IDENTITY.items(), wanted, strict=True):
            found = getattr(header, field)
            if expected is not None and found != expected:
                named = first_lines(known) if refusal is OtherSettings else ''
                raise refusal(named or f'{field} is {found!r}, expected {expected!r}', path)
        if known:
            raise OtherSettings(first_lines(known), path)

    def differs(self, header: SlotHeader) -> Differences:
        """Differences of this job from the job that captured the slot; empty if unknown.

        A window with only doubtful differences may be used.
        """
        if self.settings is None or not header.settings:
            return Differences([], [])
        return differences(decode(header.settings), self.settings)


def verified_header(
    path: Path, name: WindowName | None, entry: Entry, frame: bytes | memoryview
) -> SlotHeader:
    """Verify and decode the `frame` at `entry` of a file that claims to hold window `name`.

    Raises `RefusedWindow` if it is damaged, of another version, or contradicts the file.
    """
    try:
        header = decode_frame(frame)
        if header.version != FORMAT_VERSION:
            raise unknown_version(path, header.version)
        if header.slot != entry.slot:
            raise ValueError(f'the header is that of slot {header.slot}')
        check_layout(header, name, entry.payload_bytes)
    except ValueError as error:
        raise CorruptWindow(f'slot {entry.slot}: {error}', path) from error
    return header


def check_whole(path: Path, headers: Sequence[SlotHeader], expected: Expected) -> None:
    """Check that headers of all slots, ascending, make up a whole window, the expected one.

    Raises a `RefusedWindow` typed by the reason; `path` is for its message.
    """
    if not headers:
        raise TruncatedWindow('holds no slot', path)
    if len({header.window for header in headers}) > 1:
        raise CorruptWindow('slots disagree on the length of the window', path)
    window = headers[0].window
    if len(headers) != window or headers[-1].slot != window - 1:
        present = [header.slot for header in headers]
        raise TruncatedWindow(f'has slots {present} of a window of {window}', path)
    for field in IDENTITY:
        found = {getattr(header, field) for header in headers}
        if len(found) > 1:
            raise CorruptWindow(f'slots disagree on {field}: {sorted(found)}', path)
    expected.check(headers[0], path)


def damaged(path: Path, slot: int, record: Record) -> CorruptWindow:
    return CorruptWindow(
        f'slot {slot}: checksum mismatch in operator {record.operator}, tensor {record.tensor}, '
        f'part {record.part}, elements [{record.start}, {record.end})',
        path,
    )
