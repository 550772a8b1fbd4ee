# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from moevement_ext.memory import witness as module
from moevement_ext.memory.sizing import BESIDE_BYTES, beside_bytes, window_file_bytes
from moevement_ext.memory.window.slot import Record, SlotContext, SlotHeader, decode_context
from moevement_ext.memory.witness import Witness
from tests.unit.memory.samples import make_header, tmpfs_directory

_NAME = 'chunk0.decoder.layers.59.mlp.experts.local_experts.159.linear_fc2.weight'


def header_of(slot: int) -> SlotHeader:
    context = SlotContext(full=['a'], weights=['b'], state=bytes(1000), loss=0.5)
    return replace(make_header(slot), context=msgspec.msgpack.encode(context))


@pytest.fixture
def path() -> Iterator[Path]:
    with tmpfs_directory() as shm:
        yield shm / 'captured-before'


def test_headers_outlive_the_process(path: Path) -> None:
    first, second = header_of(0), header_of(1)
    Witness(path).remember([first])
    after = Witness(path)
    after.remember([first, second])
    assert [header.slot for header in Witness(path).after(first.start - 1)] == [1, 0]
    assert Witness(path).after(first.start) == []


def test_forget_deletes_the_headers_and_the_file(path: Path) -> None:
    witness = Witness(path)
    witness.remember([header_of(0)])
    witness.forget()
    assert witness.after(-1) == Witness(path).after(-1) == []
    assert not path.exists()


@pytest.mark.parametrize('cut', [0, 4, 20, -1])
def test_damaged_file_is_ignored(cut: int, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Witness(path).remember([header_of(0)])
    path.write_bytes(path.read_bytes()[:cut])
    assert Witness(path).after(-1) == []
    assert 'is ignored' in caplog.text


def test_damaged_file_that_can_be_decoded_is_ignored(path: Path) -> None:
    """Else a wrong checksum in it would refuse a right recovery."""
    Witness(path).remember([header_of(0)])
    damaged = bytearray(path.read_bytes())
    damaged[0] ^= 1
    path.write_bytes(damaged)
    assert Witness(path).after(-1) == []


def test_headers_stay_in_memory_if_the_file_cannot_be_written(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(new: Path, to: Path) -> None:
        raise OSError('no space left on device')

    Witness(path).remember([header_of(0)])
    monkeypatch.setattr(module.os, 'rename', full)
    witness = Witness(path)
    witness.remember([header_of(1)])
    assert [header.slot for header in witness.after(-1)] == [1, 0]
    assert 'in this process only' in caplog.text
    assert [header.slot for header in Witness(path).after(-1)] == [0], 'of an earlier process'
    assert list(path.parent.iterdir()) == [path], 'the unfinished file takes no space'


def test_memory_plan_has_space_for_the_file(path: Path) -> None:
    """For two windows of 5,000 tensors of 1 MiB, while the file is rewritten."""
    records = [
        Record(f'layer{n // 100}.expert{n % 100}', _NAME, 'exp_avg_sq', 'float32', 0, 2**18, 0, 1)
        for n in range(5000)
    ]
    headers = [replace(header_of(slot), records=records, settings=bytes(9)) for slot in (0, 1)]
    Witness(path).remember(headers)
    window_file = window_file_bytes(len(records) * 2**20, longest_window=1)
    assert BESIDE_BYTES + 2 * path.stat().st_size <= beside_bytes(window_file)


def test_losses_and_versions_of_experts_are_kept_without_the_auxiliary_state(path: Path) -> None:
    Witness(path).remember([header_of(0)])
    [kept] = Witness(path).after(-1)
    assert decode_context(kept.context) == SlotContext(full=[], weights=[], state=b'', loss=0.5)
