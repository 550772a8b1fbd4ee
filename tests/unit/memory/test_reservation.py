# SPDX-License-Identifier: Apache-2.0
"""Early reservations are the files that the set-up needs; a failure leaves no files."""

import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory import budget, mapped_file, reservation
from moevement_ext.memory.budget import HostMemoryPlan, RankMemory
from moevement_ext.memory.limits import _MemoryLeft
from moevement_ext.memory.mapped_file import map_anew
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.reservation import EarlyReservation, ReservedPages, _KeptFile, kept_by
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.window.generations import FileSize, OwnerWindows
from tests.unit.memory.samples import begun, capacity, named, tmpfs_directory, write_window

CPU = torch.device('cpu')
NBYTES = 1 << 20
OWNERS = (2, 0)
"""Rank 2 keeps its own windows, and replicas of rank 0."""


@pytest.fixture
def root() -> Iterator[Path]:
    with tmpfs_directory() as path:
        yield path
    mapped_file.forget_prepared_maps()


def on(root: Path, node: str) -> NodeStore:
    return NodeStore(root, 'run', node)


def set_up(store: NodeStore) -> None:
    """Reserve the files of the set-up of rank 2."""
    for owner in OWNERS:
        OwnerWindows(store, 2, owner, NBYTES)
    (store.holder_path(2) / 'upstream-log').write_bytes(bytes(NBYTES))


@pytest.fixture
def files(root: Path) -> list[_KeptFile]:
    store = on(root, 'lost')
    set_up(store)
    found = kept_by(store, 2)
    store.close()
    return found


def whole(store: NodeStore) -> dict[str, int]:
    """Fully reserved files by name, with their inode numbers."""
    path = store.holder_path(2)
    found = [*path.glob('*/*.window'), *path.glob('upstream-log')]
    assert all(file.stat().st_blocks * 512 == file.stat().st_size == NBYTES for file in found)
    return {str(file.relative_to(path)): file.stat().st_ino for file in found}


def test_file_that_is_renamed_meanwhile_is_left_out(root: Path) -> None:
    store = on(root, 'lost')
    set_up(store)
    (store.owner_path(2, 2) / 'free-9.window').symlink_to('renamed')
    assert len(kept_by(store, 2)) == 5
    store.close()


def test_reservation_has_the_pages_of_the_lost_process(root: Path) -> None:
    EarlyReservation(on(root, 'spare'), 2, [_KeptFile('2', NBYTES, NBYTES // 4)]).wait()
    [file] = on(root, 'spare').owner_path(2, 2).iterdir()
    assert (file.stat().st_size, file.stat().st_blocks * 512) == (NBYTES, NBYTES // 4)


def test_reservation_does_not_delay_the_end_of_its_process(
    root: Path, files: list[_KeptFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set-up may fail meanwhile: nothing waits for the threads then."""
    hold = threading.Event()
    monkeypatch.setattr(reservation, 'prepare_map', lambda *file: hold.wait())
    early = EarlyReservation(on(root, 'spare'), 2, files)
    threads = [item for item in threading.enumerate() if item.name == 'sparse-ckpt-reserve']
    assert threads and all(item.daemon for item in threads)
    hold.set()
    early.wait()


def test_insufficient_space_prevents_a_reservation(
    root: Path, files: list[_KeptFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservation, 'free_bytes', lambda path: 5 * NBYTES - 1)
    EarlyReservation(on(root, 'spare'), 2, files).wait()
    assert whole(on(root, 'spare')) == {}


def full_at_the_second() -> Callable[..., object]:
    """A function that reserves one file, and fails for the second."""
    asked: list[Path] = []

    def reserve(path: Path, nbytes: int, reserved: int | None = None) -> object:
        asked.append(path)
        if len(asked) == 2:
            path.touch()
            raise HostMemoryError('full')
        return map_anew(path, nbytes, reserved)

    return reserve


def die(path: Path, nbytes: int, reserved: int | None = None) -> None:
    """Die while reserving a file."""
    os.ftruncate(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), nbytes)
    os.kill(os.getpid(), signal.SIGKILL)


def test_failed_reservation_leaves_no_files(
    root: Path, files: list[_KeptFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservation, 'prepare_map', full_at_the_second())
    EarlyReservation(on(root, 'spare'), 2, files).wait()
    assert whole(on(root, 'spare')) == {}
    monkeypatch.undo()
    set_up(on(root, 'spare'))  # the directory is no longer locked
    assert len(whole(on(root, 'spare'))) == 5


def test_successor_recovers_from_a_death_while_reserving(
    root: Path, files: list[_KeptFile]
) -> None:
    if (pid := os.fork()) == 0:
        reservation.prepare_map = die
        EarlyReservation(on(root, 'spare'), 2, files).wait()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    left = list(on(root, 'spare').holder_path(2).glob('*/*.window'))
    assert left and any(file.stat().st_blocks == 0 for file in left)
    EarlyReservation(on(root, 'spare'), 2, files).wait()
    set_up(on(root, 'spare'))
    assert len(whole(on(root, 'spare'))) == 5


@pytest.mark.parametrize('directory', ['..', '/tmp', '2/../../3', 'x2'])
def test_file_list_with_a_foreign_path_is_ignored(root: Path, directory: str) -> None:
    EarlyReservation(on(root, 'spare'), 2, [_KeptFile(directory, NBYTES, NBYTES)]).wait()
    assert not any(file.suffix == '.window' for file in root.rglob('*'))


# ---- memory maps


def addresses() -> set[int]:
    """Addresses of maps made in advance."""
    maps = mapped_file._prepared.values()
    return {int(np.frombuffer(one, np.uint8).ctypes.data) for one in maps}


def maps_of(windows: OwnerWindows) -> set[int]:
    return {int(file.array.ctypes.data) for file in windows.files()}


def test_set_up_takes_over_the_maps(root: Path, files: list[_KeptFile]) -> None:
    EarlyReservation(on(root, 'spare'), 2, files).wait()
    made = addresses()
    assert len(made) == 5
    spare = on(root, 'spare')
    taken = [OwnerWindows(spare, 2, owner, NBYTES) for owner in OWNERS]
    log = UpstreamLog(spare.holder_path(2) / 'upstream-log', NBYTES, CPU, 0.0, pytest.fail)
    try:
        found = set().union(*map(maps_of, taken)) | {int(log.array.ctypes.data)}
        assert found == made and not addresses()
    finally:
        log.close()


def test_existing_files_are_mapped_unchanged(root: Path) -> None:
    """On the node of the lost process: with its captured windows, and without further pages."""
    store = on(root, 'same')
    size = FileSize(NBYTES, capacity())
    before = OwnerWindows(store, 2, 2, size)
    file = begun(before, 0)
    write_window(file)
    before.commit(file)
    pages = {path.stat().st_ino: path.stat().st_blocks for path in store.owner_path(2, 2).iterdir()}
    store.close()
    EarlyReservation(on(root, 'same'), 2, [_KeptFile('2', NBYTES, NBYTES)]).wait()
    made = addresses()
    now = [path.stat() for path in store.owner_path(2, 2).iterdir()]
    assert {status.st_ino: status.st_blocks for status in now} == pages
    after = OwnerWindows(on(root, 'same'), 2, 2, size)
    assert maps_of(after) == made and len(made) == 2
    found = after.file(named(0))
    assert found is not None
    found.verify_payloads(found.headers())


def test_map_of_another_size_is_not_used(root: Path) -> None:
    EarlyReservation(on(root, 'spare'), 2, [_KeptFile('2', NBYTES, NBYTES)]).wait()
    made = addresses()
    windows = OwnerWindows(on(root, 'spare'), 2, 2, 2 * NBYTES)
    assert not maps_of(windows) & made
    assert {file.array.size for file in windows.files()} == {2 * NBYTES}


# ---- pages reserved by a spare node


def test_pages_reserved_by_a_spare_node_are_used(root: Path, files: list[_KeptFile]) -> None:
    spare = on(root, 'spare')
    pages = ReservedPages(spare)
    pages.reserve([file.reserved for file in files])
    reserved = {path.stat().st_ino for path in pages.path.iterdir()}
    EarlyReservation(on(root, 'spare'), 2, files).wait()
    assert set(whole(spare).values()) == reserved
    assert pages.nbytes() == 0


def test_reserved_files_of_other_sizes_are_resized(root: Path) -> None:
    spare = on(root, 'spare')
    pages = ReservedPages(spare)
    pages.reserve([NBYTES // 4, 2 * NBYTES])
    wanted = [_KeptFile('2', NBYTES, NBYTES) for _ in range(3)]
    EarlyReservation(on(root, 'spare'), 2, wanted).wait()
    assert len(whole(spare)) == 3


def test_reserved_pages_count_as_free_space(
    root: Path, files: list[_KeptFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = on(root, 'spare')
    ReservedPages(spare).reserve([file.reserved for file in files])
    monkeypatch.setattr(reservation, 'free_bytes', lambda path: 0)
    monkeypatch.setattr(budget, 'free_bytes', lambda path: 0)
    plan = HostMemoryPlan({2: RankMemory(own_windows=5 * NBYTES, replicas=0, ledger=0)})
    plan.check(None, spare.path)
    EarlyReservation(on(root, 'spare'), 2, files).wait()
    assert len(whole(spare)) == 5
    plan.check(None, spare.path)


def test_spare_node_without_space_reserves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = on(root, 'spare')
    monkeypatch.setattr(reservation, 'map_anew', full_at_the_second())
    ReservedPages(spare).reserve([NBYTES, NBYTES, NBYTES])
    assert not spare.path.exists()


def test_set_up_recovers_from_a_spare_agent_killed_while_reserving(
    root: Path, files: list[_KeptFile]
) -> None:
    if (pid := os.fork()) == 0:
        reservation.map_anew = die
        ReservedPages(on(root, 'spare')).reserve([file.reserved for file in files])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    EarlyReservation(on(root, 'spare'), 2, files).wait()
    assert len(whole(on(root, 'spare'))) == 5


def test_no_file_follows_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slowly(path: Path, nbytes: int) -> Any:
        made = map_anew(path, nbytes)
        began.set()
        assert go_on.wait(60)
        return made

    monkeypatch.setattr(reservation, 'map_anew', slowly)
    with tmpfs_directory() as root:
        pages = ReservedPages(NodeStore(root, 'run', 'c'))
        reserving = threading.Thread(target=pages.reserve, args=([mmap.PAGESIZE] * 3,))
        reserving.start()
        assert began.wait(60)
        pages.end()
        go_on.set()
        reserving.join()
        assert [path.name for path in pages.path.iterdir()] == ['0']


def test_pages_beyond_the_memory_limit_are_not_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the kernel ends the agent of the spare node."""
    left = _MemoryLeft(2 * mmap.PAGESIZE, tmp_path)
    monkeypatch.setattr(reservation, 'memory_left', lambda: left)
    pages = ReservedPages(NodeStore(tmp_path, 'run', 'c'))
    pages.reserve([mmap.PAGESIZE] * 3)
    assert pages.nbytes() == 0 and f'the memory limit ({tmp_path}) leaves' in caplog.text
    pages.reserve([mmap.PAGESIZE] * 2)
    assert pages.nbytes() > 0
