# SPDX-License-Identifier: Apache-2.0
"""Windows with valid checksums whose directory or headers say something else in one place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window import format as window_format
from moevement_ext.memory.window.directory import committed_name
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.refusal import CorruptWindow, RefusedWindow
from moevement_ext.memory.window.slot import SlotHeader, encode_frame
from tests.unit.memory.samples import (
    RUN,
    TOPOLOGY,
    WINDOW,
    capacity,
    commit,
    content,
    make_file,
    make_header,
    named,
    restart,
    tmpfs_directory,
    write_window,
)

_INTEGERS = st.one_of(st.integers(0, 2**63 - 1), st.integers(0, 2**17), st.integers(0, WINDOW + 1))


def require_refused(path: Path) -> None:
    with pytest.raises(RefusedWindow):
        WindowFile.open(path).verify(Expected(RUN, TOPOLOGY))


def rewrite_directory(file: WindowFile, entries: list[window_format.Entry]) -> None:
    file._write_directory(window_format.Directory(file.name, entries))


def forge_header(path: Path, forge: Callable[[SlotHeader], SlotHeader]) -> None:
    """Give slot 1 of a complete window another header."""
    file = WindowFile.create(path, capacity() + 2**12)
    file.begin(named(0))
    write_window(file)
    frame = encode_frame(forge(file.header(1)))
    with file._lock:
        at = file._take(len(frame))
    file.array[at : at + len(frame)] = np.frombuffer(frame, np.uint8)
    first, second, last = file._directory.entries
    moved = msgspec.structs.replace(second, frame_offset=at, frame_bytes=len(frame))
    rewrite_directory(file, [first, moved, last])


@given(
    field=st.sampled_from(['start', 'window', 'slot', 'iteration', 'payload_bytes', 'owner']),
    value=_INTEGERS,
)
def test_header_with_another_number_is_refused(field: str, value: int) -> None:
    with tmpfs_directory() as shm:

        def forge(header: SlotHeader) -> SlotHeader:
            assume(getattr(header, field) != value)
            return msgspec.structs.replace(header, **{field: value})

        forge_header(shm / 'w', forge)
        require_refused(shm / 'w')


@pytest.mark.parametrize(
    'fields', [{'start': WINDOW, 'iteration': WINDOW + 1}, {'plan': 'plan2'}], ids=['start', 'plan']
)
def test_header_of_another_window_is_refused(fields: dict[str, Any], shm: Path) -> None:
    forge_header(shm / 'w', lambda header: msgspec.structs.replace(header, **fields))
    with pytest.raises(CorruptWindow, match='slot 1: header of window .* in a file of 0-plan1'):
        WindowFile.open(shm / 'w').verify(Expected())


@given(offset=_INTEGERS, nbytes=_INTEGERS)
@example(offset=0, nbytes=2**62)
@example(offset=2**62, nbytes=1000)
@example(offset=1, nbytes=1000)
def test_header_with_another_place_of_a_record_is_refused(offset: int, nbytes: int) -> None:
    with tmpfs_directory() as shm:

        def forge(header: SlotHeader) -> SlotHeader:
            first, *rest = header.records
            assume((offset, nbytes) != (first.offset, first.nbytes))
            moved = msgspec.structs.replace(first, offset=offset, nbytes=nbytes)
            return msgspec.structs.replace(header, records=[moved, *rest])

        forge_header(shm / 'w', forge)
        require_refused(shm / 'w')


@pytest.mark.parametrize(('offset', 'nbytes'), [(8, 1000), (0, 2**20), (2**40, 1000)])
def test_record_outside_of_its_payload_is_refused(offset: int, nbytes: int, shm: Path) -> None:

    def forge(header: SlotHeader) -> SlotHeader:
        first, *rest = header.records
        moved = msgspec.structs.replace(first, offset=offset, nbytes=nbytes)
        return msgspec.structs.replace(header, records=[moved, *rest])

    forge_header(shm / 'w', forge)
    with pytest.raises(CorruptWindow, match='are not aligned within the'):
        WindowFile.open(shm / 'w').verify(Expected())


@given(
    at=st.integers(0, WINDOW - 1),
    field=st.sampled_from(window_format.Entry.__struct_fields__),
    value=_INTEGERS,
)
def test_directory_with_another_number_is_refused(at: int, field: str, value: int) -> None:
    with tmpfs_directory() as shm:
        file = make_file(shm / 'w')
        entries = [*file._directory.entries]
        assume(getattr(entries[at], field) != value)
        entries[at] = msgspec.structs.replace(entries[at], **{field: value})
        rewrite_directory(file, entries)
        require_refused(shm / 'w')


def test_slot_listed_twice_is_refused(shm: Path) -> None:
    file = make_file(shm / 'w')
    first, _, last = file._directory.entries
    rewrite_directory(file, [first, last, last])
    with pytest.raises(CorruptWindow, match='a slot is listed twice'):
        WindowFile.open(shm / 'w').verify(Expected())


def test_frame_of_another_slot_is_refused(shm: Path) -> None:
    file = make_file(shm / 'w')
    _, second, last = file._directory.entries
    rewrite_directory(file, [msgspec.structs.replace(second, slot=0), second, last])
    with pytest.raises(CorruptWindow, match='the header is that of slot 1'):
        WindowFile.open(shm / 'w').verify(Expected())


@pytest.mark.parametrize(
    ('field', 'value', 'refusal'),
    [
        ('run', 'another', 'disagree on run'),
        ('topology', 'another', 'disagree on topology'),
        ('owner', 7, 'disagree on owner'),
        ('window', WINDOW + 1, 'disagree on the length'),
    ],
)
def test_window_with_a_slot_of_another_job_is_refused(
    field: str, value: object, refusal: str, shm: Path
) -> None:
    file = WindowFile.create(shm / 'w', capacity())
    file.begin(named(0))
    for slot in range(WINDOW):
        header = make_header(slot)
        file.reserve_slot(slot, header.payload_bytes)[:] = content(header)
        forged = {field: value} if slot == 1 else {}
        file.seal_slot(msgspec.structs.replace(header, **forged))
    with pytest.raises(CorruptWindow, match=refusal):
        WindowFile.open(shm / 'w').verify_identity(Expected())


def test_window_in_a_file_with_another_name_is_dropped(shm: Path) -> None:
    """Else the process would offer it as a window that it is not."""
    store = NodeStore(shm, 'run1', 'node0')
    path = commit(OwnerWindows(store, 0, 0, capacity()), 0).path
    path.rename(path.with_name(committed_name(named(WINDOW))))
    assert OwnerWindows(restart(store), 0, 0, capacity()).committed() == []
