# SPDX-License-Identifier: Apache-2.0
"""Which parts of windows of another layout count for a strategy."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.errors import UserError
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.shelf import Part, Shelf
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import RankIdentity, Window, WindowName
from moevement_ext.memory.window.settings import Layout, Placed, Seat
from moevement_ext.memory.window.slot import FORMAT_VERSION
from moevement_ext.recover.reshard import found
from moevement_ext.recover.reshard.found import (
    Candidate,
    Elsewhere,
    Stock,
    _Seen,
    require_exact,
    require_parts,
    take_stock,
)
from tests.unit.memory.samples import RUN, TOPOLOGY, capacity, commit, make_header, tmpfs_directory

PLACED = Placed('training', Layout(2, data=2), Seat())
HEADER = msgspec.structs.replace(make_header(0, 4, 'plan', window=1), placed=PLACED)


def candidate(slots: int) -> Candidate:
    return Candidate('run', Window(WindowName(4, 'plan'), slots), Layout(4, data=4))


@pytest.mark.parametrize('ranks', [2, 4, 6])
def test_only_windows_of_one_slot_are_exact_in_any_layout(ranks: int) -> None:
    require_exact(candidate(1), ranks)
    with pytest.raises(UserError, match=f'with 4 ranks instead of {ranks}, or leave the flag out'):
        require_exact(candidate(3), ranks)


@pytest.mark.parametrize(
    ('own', 'refused'), [(-1, True), (3, True), (4, False), (5, False), (6, False)]
)
def test_remains_of_a_replaced_layout_do_not_count(own: int, refused: bool) -> None:
    torn = [Candidate('run', Window(WindowName(at, 'plan'), 1), Layout(4)) for at in (5, 4)]
    with pytest.raises(UserError, match='no node here has') if refused else nullcontext():
        require_parts(Elsewhere([], [], torn), own)


def test_newer_window_without_all_parts_is_not_passed_over_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = [(4, 0), (4, 1), (5, 0)]
    seen = [
        _Seen(Part('run.a', Window(WindowName(start, 'plan'), 1), owner, False), PLACED, [])
        for start, owner in held
    ]
    monkeypatch.setattr(found, 'take_stock', lambda *given: Stock(seen, []))
    rank: Any = SimpleNamespace(
        number=0, identity=None, config=None, exchange=lambda name, own: [own]
    )
    elsewhere = found.find(rank, None, -1, None)  # type: ignore[arg-type]
    assert elsewhere.dense_at == 4
    assert 'window 5 of 2 ranks (DP 2) is not used: no node here has' in caplog.text
    assert 'the parts of ranks 1' in caplog.text and 'window 4' not in caplog.text


@pytest.mark.parametrize(
    ('given', 'counting'),
    [({}, [False, True]), ({'strategy': 'checkfreq', 'disk': '/disk'}, [True])],
)
def test_disk_only_strategy_skips_host_memory(given: dict[str, Any], counting: list[bool]) -> None:
    window = Window(WindowName(4, 'plan'), 1)
    parts = [(Part('run.a', window, 0, on_disk), HEADER) for on_disk in (False, True)]
    shelf = SimpleNamespace(runs=lambda: ['run.a'], whole_windows=lambda run: parts, unread={})
    identity = RankIdentity('run', 'topology', 0, placed=PLACED)
    stock = take_stock(identity, SparseCheckpointConfig(**given), shelf)  # type: ignore[arg-type]
    assert [seen.part.on_disk for seen in stock.seen] == counting
    assert stock.runs == ['run.a'], 'what is in memory is freed all the same'


@pytest.mark.parametrize('damaged', [False, True])
def test_only_unreadable_windows_are_deleted_unread(damaged: bool) -> None:
    with tmpfs_directory() as shm:
        other = NodeStore(shm, f'{RUN}.11111111', 'node0')
        path = commit(OwnerWindows(other, 0, 0, capacity()), 30).path
        other.close()
        with open(path, 'r+b') as file:
            file.seek(40 if damaged else len(b'MoEvWin\0'))
            file.write(bytes([FORMAT_VERSION + 1]))
        shelf = Shelf(NodeStore(shm, f'{RUN}.22222222', 'node0'), None)
        identity = RankIdentity(RUN, TOPOLOGY, 0, placed=PLACED)
        stock = take_stock(identity, SparseCheckpointConfig(dir=str(shm)), shelf)
        assert bool(stock.runs) == damaged and [*stock.unread.values()] == ([] if damaged else [30])
    elsewhere = Elsewhere([], stock.runs, unread=stock.unread)
    with nullcontext() if damaged else pytest.raises(UserError, match='format version'):
        require_parts(elsewhere, 29)
    require_parts(elsewhere, 30)
