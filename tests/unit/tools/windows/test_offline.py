# SPDX-License-Identifier: Apache-2.0
"""Windows of one slot are chosen and read without the ranks that captured them."""

from pathlib import Path

import pytest

from moevement_ext.memory.shelf import read_any
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.settings import Layout, Placed, Seat
from tests.unit.memory.samples import capacity, content, make_header, named
from tools.windows.__main__ import main
from tools.windows.export import copies_of, whole_window
from tools.windows.found import find

RANKS = 2
SHELVES = ((0, 0), (1, 1), (1, 0))
"""Holder and owner of all windows: rank 1 also has replicas of rank 0."""


def commit(root: Path, start: int, slots: int = 1, placed: bool = True) -> list[WindowFile]:
    """A window of each owner, and the replica."""
    files = []
    for holder, owner in SHELVES:
        folder = root / 'run1' / 'node0' / str(holder) / str(owner)
        folder.mkdir(parents=True, exist_ok=True)
        file = WindowFile.create(folder / f'window-{named(start)}.window', capacity())
        file.begin(named(start))
        for slot in range(slots):
            header = make_header(slot, start, owner=owner, window=slots)
            if placed:
                header.placed = Placed('training', Layout(RANKS, data=RANKS), Seat(data=owner))
            file.reserve_slot(slot, header.payload_bytes)[:] = content(header)
            file.seal_slot(header)
        files.append(file)
    return files


def test_the_newest_window_of_all_ranks_is_chosen_with_all_its_copies(tmp_path: Path) -> None:
    commit(tmp_path, 4)
    files = commit(tmp_path, 5)
    for file in commit(tmp_path, 6)[::2]:
        file.path.unlink()  # there is none of rank 0
    window = whole_window(find(tmp_path), tmp_path)
    assert {(one.run, one.start) for one in window} == {('run1', 5)}
    assert {one.path for one in window} == {file.path for file in files}


def test_a_window_that_takes_a_replay_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(tmp_path, 4, slots=3)
    command = ['export', str(tmp_path), '--to', 'torch_dist', '--output', str(tmp_path / 'dense')]
    assert main([*command, '--offline', '--', '--num-layers', '4']) == 1
    said = capsys.readouterr().err
    assert 'window 4-plan1 has 3 slots, which only a replay puts together' in said
    assert 'export without --offline' in said and said.count('\n') == 1


def test_a_damaged_record_is_read_from_the_replica(tmp_path: Path) -> None:
    own, _, replica = commit(tmp_path, 4)
    payload = bytes(own.payload(0))
    record = own.header(0).records[2]
    own.payload(0)[record.offset] ^= 1
    copies = copies_of(whole_window(find(tmp_path), tmp_path))
    assert {owner: len(own) for owner, own in copies.items()} == {0: 2, 1: 1}
    expected = payload[record.offset : record.offset + record.nbytes]
    assert bytes(read_any(copies[0], 0, 2)) == expected
    replica.payload(0)[record.offset] ^= 1
    with pytest.raises(RefusedWindow) as refusal:
        read_any(copies_of(find(tmp_path))[0], 0, 2)
    for path in (own.path, replica.path):
        assert f'{path}: slot 0: checksum mismatch in operator expert-2' in str(refusal.value)


def test_a_replica_of_other_bytes_does_not_stand_in(tmp_path: Path) -> None:
    own, _, replica = commit(tmp_path, 4)
    header = replica.header(0)
    replica.begin(named(4))
    replica.reserve_slot(0, header.payload_bytes)[:] = 0
    replica.seal_slot(header)
    own.payload(0)[own.header(0).records[2].offset] ^= 1
    window = sorted(find(tmp_path), key=lambda one: one.path != own.path)
    with pytest.raises(RefusedWindow, match='checksum mismatch'):
        read_any(copies_of(window)[0], 0, 2)
