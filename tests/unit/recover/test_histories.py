# SPDX-License-Identifier: Apache-2.0
"""A node that was away comes back with parts of windows of an earlier history."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from moevement_ext.membership.report import Report
from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import HeldWindow, History, Window, WindowName, drawn_history
from moevement_ext.recover.inventory import candidates, take_stock
from moevement_ext.recover.verdict import Localized, decide_recovery
from tests.unit.memory.samples import (
    PLAN,
    capacity,
    identity_of,
    make_file,
    tmpfs_directory,
    write_window,
)
from tests.unit.recover.test_verdict import (
    LAST,
    Job,
    everywhere,
    localized,
    replacement,
    survivor,
)

START = 6
FIRST = History(drawn_history())
SECOND = FIRST.after(FIRST.window(0, PLAN))


@pytest.fixture
def shm() -> Iterator[Path]:
    with tmpfs_directory() as path:
        yield path


def in_memory(shm: Path, rank: int, history: History) -> list[HeldWindow]:
    """What the node of a rank has: the rank's own window, and its copy of the other rank's."""
    with_node = NodeStore(shm, 'run', f'node{rank}')
    for owner in (0, 1):
        windows = OwnerWindows(with_node, rank, owner, capacity())
        file = windows.begin(history.window(START, PLAN))
        assert file is not None
        write_window(file, owner)
        windows.commit(file)
    with_node.close()
    store = NodeStore(shm, 'run', f'node{rank}')
    found = take_stock(store, None, identity_of(rank)).memory
    store.close()
    return found


def on_disk(root: Path, rank: int, history: History) -> list[HeldWindow]:
    file = make_file(root / f'memory{rank}', START, history.window(START, PLAN).plan, owner=rank)
    (root / f'node{rank}').mkdir()
    disk = DiskWindows(root / f'node{rank}', 'run', rank)
    disk.write(file, identity_of(rank))
    store = NodeStore(root, 'run', f'node{rank}')
    found = take_stock(store, disk, identity_of(rank)).disk
    disk.close()
    store.close()
    return found


@pytest.mark.parametrize('alike', [True, False])
def test_parts_on_disk_join_only_within_a_history(alike: bool, tmp_path: Path) -> None:
    held = on_disk(tmp_path, 0, SECOND) + on_disk(tmp_path, 1, SECOND if alike else FIRST)
    assert len(held) == 2
    assert len(candidates(held, 2)) == alike


def test_the_later_history_is_taken_of_two_whole_windows(shm: Path) -> None:
    held = in_memory(shm, 0, SECOND) + in_memory(shm, 1, FIRST)
    assert [window.name.history for window in candidates(held, 2)] == [SECOND.name, FIRST.name]


def in_history(history: History, *windows: Window, lost: int = 2) -> list[Report]:
    """Of three stages one is lost, and its node has parts of other histories."""
    reports = [survivor(9, windows=everywhere(3, *windows)) for _ in range(3)]
    reports = [msgspec.structs.replace(report, history=history) for report in reports]
    reports[lost] = replacement()
    return reports


PAST, PRESENT, AWAY = (f'{number:016x}' for number in (1, 2, 3))
BASE = Window(WindowName(2, f'{PAST}_plan'), 1)


@pytest.mark.parametrize(
    ('start', 'history', 'taken'),
    [
        (6, PRESENT, True),
        (6, PAST, False),
        (6, AWAY, False),
        (2, PAST, True),
        (1, PAST, True),
        (2, AWAY, False),
    ],
)
def test_whole_windows_of_another_history_are_not_taken(
    start: int, history: str, taken: bool
) -> None:
    window = Window(WindowName(start, f'{history}_plan'), 1)
    verdict = Job(in_history(History(PRESENT, BASE.name), window), [0, 1, 2]).verdict()
    assert isinstance(verdict, Localized) == taken
    if isinstance(verdict, Localized):
        assert verdict.window == window


@pytest.mark.parametrize(
    ('stage_of', 'together', 'goes_back'),
    [([0, 1, 2], False, False), ([0, 1, 2], True, True), ([0, 0, 0], False, True)],
)
def test_a_history_begins_where_no_stage_keeps_its_state(
    stage_of: list[int], together: bool, goes_back: bool
) -> None:
    present = History(PRESENT, BASE.name)
    reports = in_history(present, BASE)
    verdict = localized(decide_recovery(reports, stage_of, (), LAST, together=together))
    begun = verdict.history_after(reports)
    assert begun == (present.after(BASE.name) if goes_back else present)
    reports[0] = msgspec.structs.replace(reports[0], history=begun)
    unharmed = msgspec.structs.replace(verdict, window=None)
    assert unharmed.history_after(reports) == begun, 'not all had heard of it when the next came'
