# SPDX-License-Identifier: Apache-2.0
"""Files of windows: whole, damaged, and forged with valid checksums."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window import file as window_file
from moevement_ext.memory.window import format as window_format
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import PREAMBLE_BYTES, Expected
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import RankIdentity, committed_name
from moevement_ext.memory.window.refusal import (
    CorruptWindow,
    OtherSettings,
    RefusedWindow,
    TruncatedWindow,
    UnknownVersion,
    WrongWindow,
)
from moevement_ext.memory.window.settings import Layout, Placed, RunSettings, Seat, encode
from moevement_ext.memory.window.slot import FORMAT_VERSION, SlotHeader, encode_frame
from tests.unit.memory.samples import (
    RUN,
    TOPOLOGY,
    WINDOW,
    capacity,
    commit,
    content,
    digest,
    make_file,
    make_header,
    named,
    restart,
    tmpfs_directory,
    write_window,
)


def load(path: Path) -> list[object]:
    """Verify an untrusted file completely."""
    return list(WindowFile.open(path).verify(Expected(RUN, TOPOLOGY)))


def filler(payload: memoryview) -> Callable[[memoryview], None]:
    """A function that receives pieces of a payload one after another, as from a socket."""
    remaining = payload

    def fill(view: memoryview) -> None:
        nonlocal remaining
        view[:] = remaining[: len(view)]
        remaining = remaining[len(view) :]

    return fill


def test_slots_may_be_reserved_before_earlier_ones_are_sealed(shm: Path) -> None:
    file = WindowFile.create(shm / 'w', capacity())
    file.begin(named(0))
    headers = [make_header(slot) for slot in range(WINDOW)]
    for header in headers:
        file.reserve_slot(header.slot, header.payload_bytes)[:] = content(header)
    for header in reversed(headers):
        file.seal_slot(header)
    assert len(WindowFile.open(shm / 'w').verify(Expected(RUN, TOPOLOGY))) == WINDOW


@pytest.mark.parametrize('piece_bytes', [1, 100, 64 * 2**10, 2**20])
def test_replica_is_byte_identical(
    shm: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_file, 'PIECE_BYTES', piece_bytes)
    source = make_file(shm / 'source')
    replica = WindowFile.create(shm / 'replica', capacity())
    replica.begin(named(0))
    for slot in source.slots():
        blob = source.slot_blob(slot)
        replica.write_blob(slot, len(blob.payload), blob.frame, filler(blob.payload))
    assert replica.verify(Expected(RUN, TOPOLOGY))
    assert (shm / 'replica').read_bytes() == (shm / 'source').read_bytes()


def test_blob_with_damaged_frame_is_refused(shm: Path) -> None:
    source = make_file(shm / 'source')
    replica = WindowFile.create(shm / 'replica', capacity())
    replica.begin(named(0))
    blob = source.slot_blob(1)
    damaged = bytearray(blob.frame)
    damaged[40] ^= 1
    received: list[int] = []
    with pytest.raises(CorruptWindow, match='slot 1'):
        replica.write_blob(1, len(blob.payload), damaged, lambda view: received.append(len(view)))
    assert replica.slots() == []
    assert sum(received) == len(blob.payload)  # the connection goes on with the next message


@pytest.mark.parametrize('piece_bytes', [100, 2**18])
def test_blob_with_damaged_payload_is_refused_while_it_arrives(
    shm: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_file, 'PIECE_BYTES', piece_bytes)
    source = make_file(shm / 'source')
    blob = source.slot_blob(1)
    replica = WindowFile.create(shm / 'replica', capacity())
    for record in source.header(1).records:
        for at in (record.offset, record.offset + record.nbytes - 1):
            replica.begin(named(0))
            damaged = bytearray(blob.payload)
            damaged[at] ^= 1
            fill = filler(memoryview(damaged))
            with pytest.raises(CorruptWindow, match=f'slot 1: .*tensor {record.tensor},'):
                replica.write_blob(1, len(damaged), blob.frame, fill)
            assert replica.slots() == []


@pytest.mark.parametrize('cut', [0, 1, PREAMBLE_BYTES - 1, PREAMBLE_BYTES, PREAMBLE_BYTES + 5000])
def test_truncated_file_is_refused(shm: Path, cut: int) -> None:
    make_file(shm / 'w')
    os.truncate(shm / 'w', cut)
    with pytest.raises(TruncatedWindow):
        load(shm / 'w')


def test_foreign_identities_are_refused_by_type(shm: Path) -> None:
    file = make_file(shm / 'w', start=3)
    with pytest.raises(OtherSettings, match='other-run'):
        file.verify(Expected('other-run', TOPOLOGY))
    with pytest.raises(OtherSettings, match='topology'):
        file.verify(Expected(RUN, 'other-topology'))
    with pytest.raises(WrongWindow, match='owner'):
        file.verify(Expected(RUN, TOPOLOGY, owner=1))
    with pytest.raises(WrongWindow, match='start'):
        file.verify(Expected(name=named(4)))
    with pytest.raises(WrongWindow, match='plan'):
        file.verify(Expected(name=named(3, 'plan2')))
    with pytest.raises(WrongWindow, match='owner is 0, expected 1'):
        file.verify(Expected.of(RankIdentity(RUN, TOPOLOGY, 1)))
    assert file.verify(Expected()) == file.verify(Expected.of(RankIdentity(RUN, TOPOLOGY, 0)))


WAS = RunSettings({'--lr': '0.1'}, files={'d.idx': '9 bytes'}, environment={'NCCL_ALGO': 'Ring'})


@pytest.mark.parametrize(
    ('digest_of_run', 'changed', 'line'),
    [
        ('other', {'flags': {'--lr': '0.2'}}, '--lr: was 0.1, is 0.2'),
        (RUN, {'files': {'d.idx': '8 bytes'}}, 'd.idx: was 9 bytes, is 8 bytes'),
        (RUN, {'files': {}}, None),
        (RUN, {'environment': {}}, None),
    ],
)
def test_window_of_other_settings_is_refused_by_name(
    shm: Path, digest_of_run: str, changed: dict, line: str | None
) -> None:
    file = WindowFile.create(shm / 'w', capacity())
    file.begin(named(0))
    for slot in range(WINDOW):
        header = make_header(slot)
        launched = b'' if slot else encode(WAS)
        file.reserve_slot(slot, header.payload_bytes)
        file.seal_slot(msgspec.structs.replace(header, settings=launched))
    now = msgspec.structs.replace(WAS, **changed)
    expected = Expected.of(RankIdentity(digest_of_run, TOPOLOGY, 0, now))
    if line is None:
        assert len(file.verify_identity(expected)) == WINDOW
        return
    with pytest.raises(OtherSettings) as refused:
        file.verify_identity(expected)
    assert str(refused.value) == f'{shm / "w"}: {line}'


def test_damaged_settings_are_refused(shm: Path) -> None:
    file = WindowFile.create(shm / 'w', capacity())
    file.begin(named(0))
    header = make_header(0)
    file.reserve_slot(0, header.payload_bytes)
    file.seal_slot(msgspec.structs.replace(header, settings=b'none'))
    with pytest.raises(CorruptWindow, match='settings cannot be decoded'):
        file.headers()


def test_file_bytes_match_the_format_version(shm: Path) -> None:
    file = WindowFile.create(shm / 'w', 2**17)
    file.begin(named(5))
    for slot in range(WINDOW):
        header = make_header(slot, start=5)
        payload = file.reserve_slot(slot, header.payload_bytes)
        payload[:] = np.arange(header.payload_bytes) % 251
        launched = b'' if slot else encode(RunSettings({'--seed': '1'}))
        placed = Placed('training', Layout(4, pipeline=2, data=2), Seat(pipeline=1))
        file.seal_slot(msgspec.structs.replace(header, settings=launched, placed=placed))
    assert FORMAT_VERSION == 5
    assert digest(shm / 'w') == 'f5aa67e63ec54b54c06094c68be57c430e47ffddaa1e227133e4056879364c6b'


@pytest.mark.parametrize('version', [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_another_file_version_is_refused(shm: Path, version: int) -> None:
    file = make_file(shm / 'w')
    file.array[8] = version
    with pytest.raises(UnknownVersion, match=f'version {version}, this program reads 5;'):
        load(shm / 'w')


@pytest.mark.parametrize('version', [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_another_header_version_is_refused(shm: Path, version: int) -> None:
    file = WindowFile.create(shm / 'w', capacity())
    file.begin(named(0))
    header = make_header(0)
    file.reserve_slot(0, header.payload_bytes)
    file.seal_slot(msgspec.structs.replace(header, version=version))
    with pytest.raises(UnknownVersion):
        file.headers()


def test_header_at_odds_with_its_file_is_not_sealed(shm: Path) -> None:
    file = WindowFile.create(shm / 'w', capacity())
    file.begin(named(0))
    header = make_header(0)
    file.reserve_slot(0, header.payload_bytes)
    for wrong in ({'start': 1}, {'payload_bytes': 64}, {'iteration': 5}, {'window': 0}):
        with pytest.raises(ValueError):
            file.seal_slot(msgspec.structs.replace(header, **wrong))
    unaligned = [msgspec.structs.replace(header.records[0], offset=8)]
    with pytest.raises(ValueError, match='not aligned'):
        file.seal_slot(msgspec.structs.replace(header, records=unaligned))
    assert file.slots() == []


@pytest.mark.parametrize('path', ['missing', '.'])
def test_missing_file_is_refused(shm: Path, path: str) -> None:
    with pytest.raises(RefusedWindow):
        load(shm / path)


@given(position=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_flipped_bit_never_changes_a_record_unnoticed(position: int, bit: int) -> None:
    with tmpfs_directory() as shm:
        file = make_file(shm / 'w')
        used = [*range(400), *range(PREAMBLE_BYTES, file.capacity)]
        file.array[used[position % len(used)]] ^= 1 << bit
        try:
            whole = WindowFile.open(shm / 'w')
            headers = whole.verify(Expected(RUN, TOPOLOGY))
        except RefusedWindow:
            return
        for header in headers:
            expected, got = content(header), whole.payload(header.slot)
            for record in header.records:
                part = slice(record.offset, record.offset + record.nbytes)
                assert np.array_equal(expected[part], got[part])


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
