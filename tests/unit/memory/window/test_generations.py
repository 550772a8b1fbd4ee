# SPDX-License-Identifier: Apache-2.0
import os
import threading
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.generations import FileSize, OwnerWindows
from moevement_ext.memory.window.name import Agreed, WindowName
from moevement_ext.memory.window.refusal import RefusedWindow, TruncatedWindow
from tests.unit.memory.samples import (
    RUN,
    TOPOLOGY,
    begun,
    capacity,
    commit,
    digest,
    named,
    restart,
    tmpfs_directory,
    write_slot,
    write_window,
)


def starts(windows: OwnerWindows) -> list[int]:
    return [window.name.start for window in windows.committed()]


def file_names(windows: OwnerWindows) -> list[str]:
    return sorted(path.name for path in windows.path.iterdir())


def test_incomplete_window_is_not_committed(store: NodeStore) -> None:
    windows = OwnerWindows(store, 0, 0, capacity())
    file = begun(windows, 0)
    with pytest.raises(TruncatedWindow):
        windows.commit(file)
    write_slot(file, 0)
    with pytest.raises(TruncatedWindow, match=r'only slots \[0\]'):
        windows.commit(file)
    assert windows.committed() == []


def test_given_up_window_is_recycled_but_not_the_persisted(store: NodeStore) -> None:
    windows = OwnerWindows(store, 0, 0, capacity())
    commit(windows, 0)
    windows.persisted(named(0))
    commit(windows, 3)
    assert windows.begin(named(6)) is None
    windows.agree(Agreed(named(0), (3,)))
    commit(windows, 6)
    assert starts(windows) == [6, 0]
    windows.agree(Agreed(named(0), (0, 3)))
    assert windows.begin(named(9)) is None, 'what is persisted cannot be given up'


def test_window_of_another_history_is_outdated_by_one_with_its_start(store: NodeStore) -> None:
    """Else windows that earlier starts put together, say, would occupy all files for ever."""
    windows = OwnerWindows(store, 0, 0, capacity())
    for plan in ('1_plan', '2_plan'):
        commit(windows, 3, plan)
    windows.persisted(named(3, '2_plan'))
    assert windows.begin(named(6, '2_plan')) is not None
    assert windows.file(named(3, '1_plan')) is None
    assert windows.file(named(3, '2_plan')) is not None


def test_window_is_not_written_twice_without_a_rollback(store: NodeStore) -> None:
    windows = OwnerWindows(store, 0, 0, capacity())
    commit(windows, 3)
    with pytest.raises(ValueError, match='discard_after'):
        windows.begin(named(3))


def test_rollback_frees_later_windows(store: NodeStore) -> None:
    windows = OwnerWindows(store, 0, 0, capacity(), generations=3)
    for start in (0, 3):
        commit(windows, start)
    windows.persisted(named(3))
    open_file = begun(windows, 6)
    windows.discard_after(0)
    assert starts(windows) == [0]
    assert windows.newest_persisted is None
    with pytest.raises(ValueError, match='not open for writing'):
        write_slot(open_file, 0)
    commit(windows, 3)
    commit(windows, 6)
    assert starts(windows) == [6, 3, 0]
    windows.persisted(named(3))
    windows.discard_after(3)
    assert windows.newest_persisted == named(3), 'the start of the rollback stays persisted'


# Restart


def captured_after(windows: OwnerWindows, start: int) -> list[tuple[int, int]]:
    return [(header.start, header.slot) for header in windows.headers_after(start)]


def test_slots_of_an_unfinished_window_outlive_several_processes(
    store: NodeStore,
) -> None:
    """A replacement may die before it has compared anything."""
    windows = OwnerWindows(store, 0, 0, capacity())
    commit(windows, 0)
    unfinished = begun(windows, 3)
    write_slot(unfinished, 0)
    WindowFile.create(windows.path / 'free-7.window', capacity())  # a surplus file
    for _ in range(3):
        store = restart(store)
        windows = OwnerWindows(store, 0, 0, capacity())
        assert captured_after(windows, 0) == [(3, 0)]

    windows.persisted(named(0))
    assert windows.begin(named(2)) is not None and captured_after(windows, 2) == []
    store.close()


def test_unfinished_window_is_captured_again_in_another_file(store: NodeStore) -> None:
    windows = OwnerWindows(store, 0, 0, capacity(), generations=3)
    unfinished = begun(windows, 3)
    write_slot(unfinished, 0)
    store = restart(store)
    windows = OwnerWindows(store, 0, 0, capacity(), generations=3)
    file = begun(windows, 3)
    write_window(file)
    windows.commit(file)
    first, second, third = file_names(windows)
    assert first.startswith('free-') and second.startswith('free-')
    assert third == 'window-3-plan1.window'
    assert captured_after(windows, 0) == [(3, slot) for slot in range(3)]
    store.close()


def test_slots_of_a_discarded_past_are_not_compared(store: NodeStore) -> None:
    windows = OwnerWindows(store, 0, 0, capacity())
    unfinished = begun(windows, 3)
    write_slot(unfinished, 0)
    store = restart(store)
    windows = OwnerWindows(store, 0, 0, capacity())
    windows.discard_after(0)
    assert captured_after(windows, 0) == []
    assert not [name for name in file_names(windows) if not name.startswith('free-')]
    store.close()


def test_restart_with_another_size_and_generation_count(store: NodeStore) -> None:
    commit(OwnerWindows(store, 0, 0, capacity(), generations=3), 0)
    second = restart(store)
    larger = capacity() + 64
    adopted = OwnerWindows(second, 0, 0, larger, generations=2)
    sizes = {path.name: path.stat().st_size for path in adopted.path.iterdir()}
    assert sizes.pop('window-0-plan1.window') == capacity()
    assert list(sizes.values()) == [larger, larger]
    adopted.persisted(named(3))
    commit(adopted, 3)
    commit(adopted, 6)
    assert adopted.begin(named(9)) is None
    adopted.agree(Agreed(named(3), (6,)))
    assert adopted.begin(named(9)) is not None
    assert starts(adopted) == [3]
    assert not (adopted.path / 'window-0-plan1.window').exists(), 'odd size is deleted in the end'
    second.close()


def test_damaged_committed_window_is_replaced(
    store: NodeStore, caplog: pytest.LogCaptureFixture
) -> None:
    windows = OwnerWindows(store, 0, 0, capacity(), generations=2)
    path = commit(windows, 0).path
    os.truncate(path, 100)
    second = restart(store)
    adopted = OwnerWindows(second, 0, 0, capacity(), generations=2)
    assert adopted.committed() == []
    assert 'window-0-plan1.window' in caplog.text
    assert [path.stat().st_size for path in adopted.path.iterdir()] == [capacity()] * 2
    second.close()


# Immutability (I3)


class Recycling(RuleBasedStateMachine):
    """Any order of calls: a file named window-* keeps its bytes as long as it has the name,
    and a window that other ranks may need keeps its name.
    """

    def __init__(self) -> None:
        super().__init__()
        self._directory = tmpfs_directory()
        self.store = NodeStore(self._directory.__enter__(), 'run1', 'node0')
        self.windows = OwnerWindows(self.store, 0, 0, capacity())
        self.next_start = 0
        self.open: WindowFile | None = None
        self.needed: set[int] = set()
        self.persisted = -1
        self.seen: dict[tuple[str, int], str] = {}

    def teardown(self) -> None:
        self.store.close()
        self._directory.__exit__(None, None, None)

    @precondition(lambda self: self.open is None)
    @rule()
    def begin(self) -> None:
        self.open = self.windows.begin(named(self.next_start))
        self.next_start += 3

    @precondition(lambda self: self.open is not None)
    @rule()
    def commit(self) -> None:
        assert self.open is not None
        write_window(self.open)
        self.windows.commit(self.open)
        self.needed.add(self.open.required_name().start)
        self.open = None

    @precondition(lambda self: self.open is not None)
    @rule()
    def abandon(self) -> None:
        assert self.open is not None
        write_slot(self.open, 0)
        self.windows.abandon(self.open)
        self.open = None

    @precondition(lambda self: self.windows.committed())
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(starts(self.windows)))
        self.windows.agree(Agreed(None, (start,)))
        if start > self.persisted:
            self.needed.discard(start)

    @precondition(lambda self: self.needed)
    @rule(data=st.data())
    def persist(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.needed)))
        self.windows.persisted(named(start))
        self.persisted = max(self.persisted, start)

    @rule(window=st.integers(1, 3))
    def change_the_length_in_force(self, window: int) -> None:
        self.windows.make_room(capacity(window))

    @rule(window=st.integers(1, 3))
    def crash_and_restart(self, window: int) -> None:
        self.store = restart(self.store)
        self.windows = OwnerWindows(self.store, 0, 0, FileSize(capacity(), capacity(window)))
        self.open = None
        self.needed = set(starts(self.windows))
        self.persisted = -1

    @invariant()
    def named_windows_are_immutable(self) -> None:
        now = {}
        for path in self.windows.path.glob('window-*'):
            now[path.name, path.stat().st_ino] = digest(path)
            assert WindowFile.open(path).verify(Expected(RUN, TOPOLOGY))
        for key, value in now.items():
            assert self.seen.get(key, value) == value
        self.seen = now

    @invariant()
    def needed_windows_exist(self) -> None:
        needed = {start for start in self.needed if start >= self.persisted}
        assert needed <= set(starts(self.windows))

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(list(self.windows.path.iterdir())) == 2


Recycling.TestCase.settings = settings(stateful_step_count=20, deadline=None)
TestRecycling = Recycling.TestCase


def test_name_changes_before_the_first_byte_is_overwritten(
    store: NodeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names_at_first_write = []
    begin = WindowFile.begin

    def spy(file: WindowFile, name: WindowName) -> None:
        names_at_first_write.append(file.path.name)
        begin(file, name)

    monkeypatch.setattr(WindowFile, 'begin', spy)
    windows = OwnerWindows(store, 0, 0, capacity(), generations=2)
    for start in (0, 3, 6):
        commit(windows, start)
        windows.persisted(named(start))
    assert names_at_first_write[-1] == 'writing-6-plan1.window'
    assert not any(name.startswith('window-') for name in names_at_first_write)


def test_readers_never_see_a_torn_window_under_its_name(store: NodeStore) -> None:
    """A reader verifies while the writer recycles: if the name still exists afterwards, the
    verified bytes are complete.
    """
    windows = OwnerWindows(store, 0, 0, capacity(), generations=2)
    verified = threading.Event()
    finished = threading.Event()
    torn: list[str] = []

    def read() -> None:
        while not finished.is_set():
            for found in store.scan():
                try:
                    file = WindowFile.open(found.path)
                    file.verify(Expected(RUN, TOPOLOGY, 0, found.name))
                    verified.set()
                except RefusedWindow as refusal:
                    if found.path.exists():
                        torn.append(str(refusal))

    reader = threading.Thread(target=read)
    reader.start()
    for index in range(300):
        commit(windows, 3 * index)
        windows.persisted(named(3 * index))
        if index % 10 == 0:  # let the reader verify some complete windows, too
            verified.clear()
            assert verified.wait(20)
    finished.set()
    reader.join()
    assert torn == []


@pytest.mark.parametrize('start', [9, 12])
def test_file_that_was_renamed_but_not_begun_is_compared_with_nothing(
    start: int, store: NodeStore
) -> None:
    windows = OwnerWindows(store, 0, 0, capacity())
    refused = begun(windows, 12)
    write_slot(refused, 0)
    windows.abandon(refused)
    killed = mock.patch.object(OwnerWindows, '_fit', side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        windows.begin(named(start))
    assert [name.split('-')[0] for name in file_names(windows)] == ['free', 'writing']
    assert OwnerWindows(restart(store), 0, 0, capacity()).headers_after(-1) == []
