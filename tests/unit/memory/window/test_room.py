# SPDX-License-Identifier: Apache-2.0
"""Files have pages for the windows in force; pages that a recovery may need stay (I3)."""

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory import mapped_file
from moevement_ext.memory.mapped_file import in_pages
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window import file as file_module
from moevement_ext.memory.window.file import FileState, WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.generations import FileSize, OwnerWindows
from moevement_ext.memory.window.refusal import RefusedWindow
from tests.support.forks import Forked
from tests.unit.memory.samples import (
    RUN,
    TOPOLOGY,
    begun,
    capacity,
    commit,
    named,
    restart,
    write_slot,
    write_window,
)

LONG, SHORT = capacity(), capacity(window=1)
SIZE = FileSize(LONG, SHORT)


def pages(windows: OwnerWindows) -> list[int]:
    """Allocated bytes of the files, smallest first."""
    return sorted(path.stat().st_blocks * 512 for path in windows.path.iterdir())


def test_longer_window_keeps_its_pages_until_its_successor_is_persisted(store: NodeStore) -> None:
    windows = OwnerWindows(store, 0, 0, LONG)
    commit(windows, 0)
    windows.persisted(named(0))
    commit(windows, 3)
    windows.make_room(SHORT)
    assert pages(windows) == [in_pages(LONG)] * 2, 'a recovery may need either'
    windows.persisted(named(3))
    assert pages(windows) == [in_pages(SHORT), in_pages(LONG)]
    commit(windows, 6, window=1)
    windows.persisted(named(6))
    assert pages(windows) == [in_pages(SHORT)] * 2


def test_held_window_keeps_its_pages(store: NodeStore) -> None:
    windows = OwnerWindows(store, 0, 0, LONG, holdable=True)
    commit(windows, 0)
    held = windows.hold(named(0))
    assert held is not None
    commit(windows, 3)
    windows.persisted(named(3))
    windows.make_room(SHORT)
    assert held.verify(Expected(RUN, TOPOLOGY, 0, named(0)))
    windows.release(held)
    windows.persisted(named(3))
    assert pages(windows) == [in_pages(SHORT)] * 2 + [in_pages(LONG)]


def test_longer_window_gets_pages_temporarily(
    store: NodeStore,
) -> None:
    windows = OwnerWindows(store, 0, 0, SIZE)
    file = windows.begin(named(0), room=LONG)
    assert file is not None and pages(windows) == [in_pages(SHORT), in_pages(LONG)]
    windows.abandon(file)
    commit(windows, 3)  # slots that were not announced
    commit(windows, 6, window=1)
    windows.persisted(named(6))
    assert pages(windows) == [in_pages(SHORT)] * 2


def test_missing_space_for_longer_windows_leaves_files_unchanged(
    store: NodeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = OwnerWindows(store, 0, 0, SIZE)
    commit(windows, 0, window=1)
    windows.persisted(named(0))

    def full(array: object, path: Path, begin: int, end: int) -> None:
        raise HostMemoryError('full')

    monkeypatch.setattr(file_module, 'reserve_range', full)
    with pytest.raises(HostMemoryError):
        windows.make_room(LONG)
    windows.make_room(SHORT)
    file = begun(windows, 3)
    with pytest.raises(HostMemoryError):
        write_window(file)
    windows.abandon(file)
    commit(windows, 6, window=1)
    assert pages(windows) == [in_pages(SHORT)] * 2


def test_reader_of_released_pages_gets_an_error(store: NodeStore) -> None:
    windows = OwnerWindows(store, 0, 0, LONG)
    path = commit(windows, 0).path
    reader = WindowFile.open(path)
    commit(windows, 3)
    windows.persisted(named(3))
    windows.make_room(SHORT)
    assert not path.exists()
    with pytest.raises(RefusedWindow):
        reader.verify(Expected(RUN, TOPOLOGY, 0, named(0)))


def test_restart_takes_no_more_pages(store: NodeStore) -> None:
    windows = OwnerWindows(store, 0, 0, LONG)
    commit(windows, 0)
    windows.persisted(named(0))
    commit(windows, 3, window=1)
    again = OwnerWindows(restart(store), 0, 0, SIZE)
    assert pages(again) == [in_pages(SHORT), in_pages(LONG)], 'what is whole is kept whole'
    found = again.file(named(0))
    assert found is not None and found.verify(Expected(RUN, TOPOLOGY, 0, named(0)))


# Process death at every moment of the reuse of a file


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_fill(array: object, path: Path, begin: int, end: int) -> None:
    mapped_file.reserve_range(array, path, begin, begin + (end - begin) // 2)  # type: ignore[arg-type]
    _die()


def _die_after_half(windows: OwnerWindows) -> None:
    file = begun(windows, 6)
    write_slot(file, 0)
    file.reserve_slot(1, 4096)[:2048] = 255
    _die()


def _patched(target: object, name: str, instead: Callable[..., Any], then: str) -> Any:
    """Run step `then` on the windows, and die in a function that it calls."""

    def run(windows: OwnerWindows) -> None:
        with mock.patch.object(target, name, instead):
            getattr(_Steps, then)(windows)

    return run


class _Steps:
    """Steps of a process after its windows 0 (persisted) and 3 (committed)."""

    @staticmethod
    def grow(windows: OwnerWindows) -> None:
        windows.make_room(LONG)

    @staticmethod
    def shrink(windows: OwnerWindows) -> None:
        windows.make_room(SHORT)

    @staticmethod
    def shrink_and_agree(windows: OwnerWindows) -> None:
        windows.make_room(SHORT)
        windows.persisted(named(3))

    @staticmethod
    def overwrite(windows: OwnerWindows) -> None:
        windows.persisted(named(3))
        write_slot(windows.begin(named(6)), 0)  # type: ignore[arg-type]


def _shrink_and_die(windows: OwnerWindows) -> None:
    _Steps.shrink(windows)
    _die()


MOMENTS: dict[str, Callable[[OwnerWindows], None]] = {
    'pages are filled': _patched(file_module, 'reserve_range', _die_in_fill, 'grow'),
    'pages would be given back': _patched(file_module, 'release_range', _die, 'shrink_and_agree'),
    'the name has changed': _patched(WindowFile, 'begin', _die, 'overwrite'),
    'a slot is half written': lambda windows: (
        windows.persisted(named(3)),
        _die_after_half(windows),
    )[-1],
    'a slot is sealed': _patched(WindowFile, 'seal_slot', _die, 'overwrite'),
    'ranks do not agree yet': _shrink_and_die,
}


def _victim(root: Path, moment: str, early: bool, room: int) -> None:
    windows = OwnerWindows(NodeStore(root, 'run1', 'node0'), 0, 0, FileSize(LONG, room))
    with ExitStack() as stack:
        commit(windows, 0)
        windows.persisted(named(0))
        commit(windows, 3)
        if early:
            needed = partial(_needed_until_a_newer_window_is_committed, windows)
            stack.enter_context(mock.patch.object(windows, '_is_needed', needed))
        MOMENTS[moment](windows)


def _needed_until_a_newer_window_is_committed(windows: OwnerWindows, file: WindowFile) -> bool:
    """Released a step too early: other ranks and replica holders may lack the newer window."""
    newest = max(one.start for one in windows._files if one.state is FileState.COMMITTED)
    return file.state is not FileState.FREE and file.start >= newest


def left_by(store: NodeStore, moment: str, early: bool = False, room: int = LONG) -> list[int]:
    """Starts of the complete windows after a process died at this moment."""
    victim = Forked(_victim, store.root, moment, early, room)
    assert victim.wait(60) == -signal.SIGKILL
    windows = OwnerWindows(store, 0, 0, SIZE)
    assert len(pages(windows)) == 2 and sum(pages(windows)) <= 2 * in_pages(LONG)
    found = [window.name for window in windows.committed()]
    for name in found:
        file = windows.file(name)
        assert file is not None and file.verify(Expected(RUN, TOPOLOGY, 0, name))
    return sorted(name.start for name in found)


@pytest.mark.parametrize('moment', MOMENTS)
def test_death_during_file_reuse_leaves_the_persisted_window(moment: str, store: NodeStore) -> None:
    room = SHORT if moment == 'pages are filled' else LONG
    left = left_by(store, moment, room=room)
    assert left in ([3], [0, 3]), 'the file of window 0 is touched once all agree on window 3'


@pytest.mark.parametrize('early', [False, True])
def test_pages_released_one_step_too_early_are_detected(early: bool, store: NodeStore) -> None:
    assert (0 in left_by(store, 'ranks do not agree yet', early)) != early


@pytest.mark.parametrize('missing_from', [0, in_pages(SHORT)])
def test_missing_space_at_a_restart_leaves_the_window_whole(
    missing_from: int, store: NodeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = OwnerWindows(store, 0, 0, SIZE)
    commit(windows, 0, window=1)
    path = windows.committed()[0].path

    def full(array: object, path: Path, begin: int, end: int) -> None:
        if end > missing_from:
            raise HostMemoryError('full')

    with monkeypatch.context() as patched:
        patched.setattr(file_module, 'reserve_range', full)
        with pytest.raises(HostMemoryError):
            OwnerWindows(restart(store), 0, 0, LONG)
    assert WindowFile.open(path).verify(Expected(RUN, TOPOLOGY, 0, named(0)))
