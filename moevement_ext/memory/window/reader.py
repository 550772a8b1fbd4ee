# SPDX-License-Identifier: Apache-2.0
"""Reads a window file without mapping it: on a disk, or for a tool.

A bad disk block fails a read, whereas it would kill the process in a map (SIGBUS). The reader
trusts no byte (invariant I7).
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory import private_file
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import (
    PREAMBLE_BYTES,
    Entry,
    Expected,
    check_whole,
    damaged,
    read_directory,
    verified_header,
)
from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.refusal import TruncatedWindow, UnreadableWindow, unopened
from moevement_ext.memory.window.slot import Record, SlotHeader

CHUNK_BYTES = 4 * 2**20
"""Size of one read or write."""

Advance = Callable[[int], None]
"""Called with the number of bytes just read or written; may wait, or raise to stop the work."""


def at_full_speed(nbytes: int) -> None: ...


class WindowReader:
    """An open window file; a context manager. One thread uses it.

    `name` is the window that the file claims to hold, None if it is empty. Raises a
    `RefusedWindow`, typed by reason, unless the file is readable, whole and of a known version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = private_file.open_file(path, os.O_RDONLY)
        except (OSError, HostMemoryError) as error:
            raise unopened(path, error) from error
        try:
            self.nbytes = os.fstat(self._fd).st_size
            preamble = self._read(0, min(PREAMBLE_BYTES, self.nbytes))
            directory = read_directory(path, np.frombuffer(preamble, np.uint8), self.nbytes)
        except BaseException:
            self.close()
            raise
        self.name: WindowName | None = directory.name
        self._entries = sorted(directory.entries, key=lambda entry: entry.slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def verify_identity(self, expected: Expected) -> list[SlotHeader]:
        """Verify, and raise, as `WindowFile.verify_identity`."""
        headers = [self._header(entry) for entry in self._entries]
        check_whole(self.path, headers, expected)
        return headers

    def verify_payloads(
        self, headers: Iterable[SlotHeader], advance: Advance = at_full_speed
    ) -> None:
        """Compare every record with its checksum; a `RefusedWindow` names the first bad one."""
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for header in headers:
            offset = self._entry(header.slot).payload_offset
            for record in header.records:
                digest = xxhash.xxh3_64()
                for at in range(0, record.nbytes, CHUNK_BYTES):
                    part = buffer[: min(CHUNK_BYTES, record.nbytes - at)]
                    self._read_into(offset + record.offset + at, part)
                    digest.update(part)
                    advance(len(part))
                if digest.intdigest() != record.checksum:
                    raise damaged(self.path, header.slot, record)

    def read_record(self, slot: int, record: Record) -> bytearray:
        """Bytes of one record, not verified. Raises `RefusedWindow` if unreadable."""
        return self._read(self._entry(slot).payload_offset + record.offset, record.nbytes)

    def copy_into(
        self, file: WindowFile, received: Callable[[WindowFile, SlotHeader], None]
    ) -> None:
        """Copy all slots into a file that was begun for this window, and verify them there.

        Calls `received` with every slot that is read and undamaged, slot 0 first. Raises
        `RefusedWindow`, or `FileTooSmall` before a slot is read.
        """
        sizes = [entry.payload_bytes + entry.frame_bytes for entry in self._entries]
        file.require(sum(sizes), len(sizes))
        for entry in self._entries:
            frame = memoryview(self._read(entry.frame_offset, entry.frame_bytes))
            fill = self._from(entry.payload_offset)
            header = file.write_blob(entry.slot, entry.payload_bytes, frame, fill)
            received(file, header)

    def _header(self, entry: Entry) -> SlotHeader:
        frame = self._read(entry.frame_offset, entry.frame_bytes)
        return verified_header(self.path, self.name, entry, memoryview(frame))

    def _entry(self, slot: int) -> Entry:
        return next(entry for entry in self._entries if entry.slot == slot)

    def _from(self, offset: int) -> Callable[[memoryview], None]:
        """Return a function that fills consecutive views from this offset on."""

        def read(view: memoryview) -> None:
            nonlocal offset
            self._read_into(offset, view)
            offset += len(view)

        return read

    def _read(self, offset: int, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        self._read_into(offset, memoryview(data))
        return data

    def _read_into(self, offset: int, view: memoryview) -> None:
        while view:
            try:
                count = os.preadv(self._fd, [view], offset)
            except OSError as error:
                raise UnreadableWindow(f'cannot be read: {error.strerror}', self.path) from error
            if not count:
                raise TruncatedWindow(f'ends at byte {offset}', self.path)
            view, offset = view[count:], offset + count
