# SPDX-License-Identifier: Apache-2.0
"""Reads one window of all its owners, whichever copy of it is undamaged."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from moevement_ext.memory.node_store import STUB
from moevement_ext.memory.shelf import Copy, copy_at_twin, copy_in_file, read_any
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.slot import Record
from moevement_ext.memory.window.twin import base_path

from .found import Found


class Copies:
    """The committed files of one window of one slot, of any owner and holder. One thread.

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
        self.headers = {owner: copies[0].headers[0] for owner, copies in self._copies.items()}

    def read(self, owner: int, index: int) -> memoryview:
        """Bytes of a record, compared with their checksum.

        Raises:
            RefusedWindow: all copies of them are damaged; the message names operator and tensor.
        """
        return read_any(self._copies[owner], 0, index)


def _opened(paths: Iterable[Path]) -> list[Copy]:
    copies, refusals = [], []
    for path in paths:
        try:
            copies.append(_opened_one(path))
        except RefusedWindow as refusal:
            refusals.append(str(refusal))
    if not copies:
        raise RefusedWindow('; '.join(refusals))
    # A copy of other bytes has the same name: it must not stand in for a damaged record.
    return [copy for copy in copies if _records(copy) == _records(copies[0])]


def _records(copy: Copy) -> list[list[Record]]:
    """Places and checksums of all slots."""
    return [header.records for header in copy.headers]


def _opened_one(path: Path) -> Copy:
    if not path.parent.name.startswith(STUB):
        return copy_in_file(path)
    if not base_path(path).exists():
        raise RefusedWindow(f'{path}: the window that it belongs to is not there')
    return copy_at_twin(path)
