# SPDX-License-Identifier: Apache-2.0
"""Reads one window of all its owners, whichever copy of it is undamaged."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import xxhash

from moevement_ext.memory.node_store import STUB
from moevement_ext.memory.window.expected import Expected, damaged
from moevement_ext.memory.window.reader import WindowReader
from moevement_ext.memory.window.refused import RefusedWindow
from moevement_ext.memory.window.slot import Record, SlotHeader
from moevement_ext.memory.window.twin import TwinWindow, base_path
from tools.windows.found import Found


class _Copy(NamedTuple):
    path: Path
    header: SlotHeader
    read: Callable[[Record], bytes | bytearray | memoryview]


class Copies:
    """The files of one window of one slot. One thread.

    Args:
        found: committed files of the window, of any owner and holder.

    Attributes:
        headers: headers of the slot, by owner.

    Raises:
        RefusedWindow: no file of an owner can be read.
    """

    def __init__(self, found: Iterable[Found]) -> None:
        files: dict[int, list[Path]] = defaultdict(list)
        for one in found:
            files[one.rank].append(one.path)
        self._copies = {owner: _opened(paths) for owner, paths in files.items()}
        self.headers = {owner: copies[0].header for owner, copies in self._copies.items()}

    def read(self, owner: int, index: int) -> memoryview:
        """Bytes of a record, compared with their checksum.

        Raises:
            RefusedWindow: they are damaged in all copies; names operator and tensor.
        """
        record = self.headers[owner].records[index]
        refusals = []
        for copy in self._copies[owner]:
            try:
                data = copy.read(record)
                if xxhash.xxh3_64_intdigest(data) != record.checksum:
                    raise damaged(copy.path, copy.header.slot, record)
                return memoryview(data)
            except RefusedWindow as refusal:
                refusals.append(str(refusal))
        raise RefusedWindow('; '.join(refusals))


def _opened(paths: Iterable[Path]) -> list[_Copy]:
    copies, refusals = [], []
    for path in paths:
        try:
            copies.append(_of_twin(path) if path.parent.name.startswith(STUB) else _of_file(path))
        except RefusedWindow as refusal:
            refusals.append(str(refusal))
    if not copies:
        raise RefusedWindow('; '.join(refusals))
    return copies


def _of_file(path: Path) -> _Copy:
    with WindowReader(path) as reader:
        (header,) = reader.verify_identity(Expected())

    def read(record: Record) -> bytearray:
        with WindowReader(path) as reader:
            return reader.read_record(header.slot, record)

    return _Copy(path, header, read)


def _of_twin(path: Path) -> _Copy:
    if not base_path(path).exists():
        raise RefusedWindow(f'{path}: the window that it belongs to is not there')
    twin = TwinWindow.open(path)
    (header,) = twin.verify_identity(Expected())

    @cache
    def payload() -> memoryview:
        return memoryview(b''.join(twin.payload(header.slot)))

    return _Copy(path, header, lambda r: payload()[r.offset : r.offset + r.nbytes])
