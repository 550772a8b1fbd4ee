# SPDX-License-Identifier: Apache-2.0
"""A stub counts as a copy only with a base from which the window can be put together."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.refusal import CorruptWindow, OtherBytes, RefusedWindow
from moevement_ext.memory.window.slot import Record, SlotHeader, align_up, encode_frame
from moevement_ext.memory.window.twin import TwinWindow, owner_header, stub_of
from tests.unit.memory.samples import (
    RUN,
    TOPOLOGY,
    WINDOW,
    capacity,
    content,
    make_file,
    make_header,
    named,
)

OWN_PARTS = {(f'decoder.layers.{slot}.weight1', 'master') for slot in range(WINDOW)}
MORE = 64

Change = Callable[[SlotHeader], SlotHeader]


@pytest.fixture
def stub(tmp_path: Path) -> WindowFile:
    """Of a window of rank 0, in the memory of rank 1."""
    owned = make_file(tmp_path / 'owned')
    made = WindowFile.create(tmp_path / 'stub', capacity())
    made.begin(named(0))
    for slot in range(WINDOW):
        blob = stub_of(owned, slot, OWN_PARTS)
        left = io.BytesIO(blob.payload)
        made.write_blob(slot, len(blob.payload), blob.frame, left.readinto)
    return made


def base_of(path: Path, change: Change) -> WindowFile:
    """The same tensors, captured by rank 1 under other headers."""
    file = WindowFile.create(path, capacity() + WINDOW * MORE)
    file.begin(named(0))
    for slot in range(WINDOW):
        header = change(msgspec.structs.replace(make_header(slot), owner=1))
        payload = file.reserve_slot(slot, header.payload_bytes)
        payload[:] = 0
        tensors = tensors_of(content(make_header(slot)), make_header(slot))
        for record in header.records:
            data = tensors.get(record.tensor, b'')
            payload[record.offset : record.offset + len(data)] = np.frombuffer(data, np.uint8)
        file.seal_slot(header)
    return file


def tensors_of(payload: np.ndarray, header: SlotHeader) -> dict[str, bytes]:
    return {
        record.tensor: payload[record.offset : record.offset + record.nbytes].tobytes()
        for record in header.records
    }


def of_another(**fields: str) -> Change:
    return lambda header: msgspec.structs.replace(header, **fields)


def longer(header: SlotHeader) -> SlotHeader:
    return msgspec.structs.replace(header, payload_bytes=header.payload_bytes + MORE)


def with_another_record(header: SlotHeader) -> SlotHeader:
    added = Record(
        operator='expert-9',
        tensor='added',
        part='master',
        dtype='float32',
        start=0,
        end=16,
        offset=0,
        nbytes=64,
    )
    return msgspec.structs.replace(header, records=[*header.records, added])


def in_another_order(header: SlotHeader) -> SlotHeader:
    at, records = 0, []
    for record in reversed(header.records):
        records.append(msgspec.structs.replace(record, offset=at))
        at = align_up(at + record.nbytes)
    assert at == header.payload_bytes
    return msgspec.structs.replace(header, records=records)


def test_stub_and_base_are_the_window(stub: WindowFile, tmp_path: Path) -> None:
    twin = TwinWindow(stub, base_of(tmp_path / 'base', lambda header: header))
    for header in twin.verify(Expected(RUN, TOPOLOGY, 0, named(0))):
        _, *pieces = twin.pieces(header.slot)
        payload = np.frombuffer(b''.join(pieces), np.uint8)
        owned = make_header(header.slot)
        assert tensors_of(payload, header) == tensors_of(content(owned), owned)


@pytest.mark.parametrize(
    ('change', 'refused', 'reason'),
    [
        (of_another(run='another'), RefusedWindow, 'its base is of another run, layout or window'),
        (of_another(topology='another'), RefusedWindow, 'its base is of another run, layout'),
        (longer, OtherBytes, 'slot 0 has other records than that of its base'),
        (with_another_record, OtherBytes, 'slot 0 has other records than that of its base'),
        (in_another_order, OtherBytes, 'ranks 0 and 1 do not hold the same'),
    ],
    ids=['run', 'layout', 'size', 'records', 'places'],
)
def test_stub_with_another_base_is_no_copy(
    change: Change,
    refused: type[RefusedWindow],
    reason: str,
    stub: WindowFile,
    tmp_path: Path,
) -> None:
    """Else the window counts as replicated, and cannot be put together once it is needed."""
    with pytest.raises(refused, match=reason):
        TwinWindow(stub, base_of(tmp_path / 'base', change))


@pytest.mark.parametrize('changed', [{'nbytes': 1}, {'tensor': 'another'}, {'checksum': 1}])
def test_stub_of_other_records_than_its_owner_has_is_refused(
    changed: dict[str, Any], stub: WindowFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = stub.headers()
    record = msgspec.structs.replace(first.records[0], **changed)
    headers = [msgspec.structs.replace(first, records=[record]), *others]
    monkeypatch.setattr(stub, 'headers', lambda: headers)
    with pytest.raises(CorruptWindow, match='slot 0 of a stub: its owner has no such record'):
        TwinWindow(stub, base_of(tmp_path / 'base', lambda header: header))


@pytest.mark.parametrize(
    'other',
    [
        make_header(1),
        make_header(0, start=WINDOW),
        make_header(0, plan='plan2'),
        make_header(0, owner=7),
        make_header(0, window=WINDOW + 1),
    ],
    ids=['slot', 'start', 'plan', 'owner', 'length'],
)
def test_stub_with_the_frame_of_another_slot_is_refused(
    other: SlotHeader, stub: WindowFile
) -> None:
    header = msgspec.structs.replace(stub.header(0), context=encode_frame(other))
    with pytest.raises(CorruptWindow, match='slot 0 of a stub: it is of rank'):
        owner_header(header, stub.path)
