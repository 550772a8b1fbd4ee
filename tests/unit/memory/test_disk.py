# SPDX-License-Identifier: Apache-2.0
"""Copies of real window files on disk: torn, damaged, too large, of another past."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moevement_ext.errors import UserError
from moevement_ext.memory import disk as module
from moevement_ext.memory.disk import DiskWindows, require_writable
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.reader import WindowReader
from moevement_ext.memory.window.refusal import (
    CorruptWindow,
    RefusedWindow,
    TruncatedWindow,
    UnreadableWindow,
)
from moevement_ext.memory.window.slot import SlotHeader
from tests.distributed.conftest import mounted_tmpfs
from tests.unit.memory.samples import (
    RUN,
    TOPOLOGY,
    WINDOW,
    capacity,
    digest,
    make_file,
    named,
    write_window,
)

pytestmark = pytest.mark.timed

IDENTITY = RankIdentity(RUN, TOPOLOGY, 0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskWindows]:
    (tmp_path / 'disk').mkdir()
    made = DiskWindows(tmp_path / 'disk', 'run1', 0)
    yield made
    made.close()


def write(disk: DiskWindows, folder: Path, *starts: int, owner: int = 0) -> list[WindowFile]:
    files = [make_file(folder / f'memory-{start}', start, owner=owner) for start in starts]
    for file in files:
        disk.write(file, IDENTITY)
    return files


def read(disk: DiskWindows, folder: Path, start: int = 0) -> tuple[WindowFile, list[SlotHeader]]:
    into = WindowFile.create(folder / f'back-{start}', capacity())
    into.begin(named(start))
    headers: list[SlotHeader] = []
    disk.read(named(start), into, lambda file, header: headers.append(header))
    into.freeze()
    return into, headers


def starts(disk: DiskWindows) -> list[int]:
    return [window.name.start for window in disk.stored()]


def names(disk: DiskWindows) -> set[str]:
    return {path.name for path in disk.path.iterdir() if path.name not in ('lock', 'complete')}


def test_copy_has_the_bytes_of_the_window(disk: DiskWindows, tmp_path: Path) -> None:
    (file,) = write(disk, tmp_path, 3)
    (stored,) = disk.stored()
    assert (stored.owner, stored.name) == (0, named(3))
    assert digest(stored.path) == digest(file.path)
    back, headers = read(disk, tmp_path, 3)
    assert [header.slot for header in headers] == list(range(WINDOW))
    assert back.verify(Expected.of(IDENTITY, named(3))) == headers
    assert all((back.payload(s) == file.payload(s)).all() for s in range(WINDOW))


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced, a directory or a file that may have no name yet, dropped from the page cache,
    and renamed, in order."""
    steps: list[str] = []
    sync, drop, rename = os.fsync, os.posix_fadvise, os.rename

    def noted_sync(fd: int) -> None:
        path = Path(os.readlink(f'/proc/self/fd/{fd}'))
        steps.append(f'sync {"/" * path.is_dir()}{path.name}')
        sync(fd)

    def noted_drop(fd: int, begin: int, nbytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        steps.append('drop all' if (begin, nbytes) == (0, 0) else f'drop {begin} {nbytes}')
        drop(fd, begin, nbytes, advice)

    def noted_rename(before: Path, after: Path) -> None:
        steps.append(f'{before.name} -> {after.name}')
        rename(before, after)

    monkeypatch.setattr(os, 'fsync', noted_sync)
    monkeypatch.setattr(os, 'fdatasync', noted_sync)
    monkeypatch.setattr(os, 'posix_fadvise', noted_drop)
    monkeypatch.setattr(os, 'rename', noted_rename)
    return steps


def test_names_above_a_window_survive_a_loss_of_power(tmp_path: Path, on_disk: list[str]) -> None:
    DiskWindows(tmp_path, 'run1', 0).close()
    assert on_disk == ['sync /run1', f'sync /{tmp_path.name}']


def test_window_gets_its_name_between_syncs_of_bytes_and_name(
    disk: DiskWindows, tmp_path: Path, on_disk: list[str]
) -> None:
    """Else a loss of power could leave the name without the bytes, or lose the name."""
    write(disk, tmp_path, 3)
    writing, window = 'writing-3-plan1.window', 'window-3-plan1.window'
    assert on_disk == [f'sync {writing}', 'drop all', f'{writing} -> {window}', 'sync /rank0']


def test_a_large_window_fills_no_page_cache_while_it_is_written(
    disk: DiskWindows, tmp_path: Path, on_disk: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, 'CHUNK_BYTES', 2**15)
    monkeypatch.setattr(module, '_SYNC_BYTES', 2**15)
    write(disk, tmp_path, 3)
    synced = 'sync writing-3-plan1.window'
    assert on_disk[:4] == [synced, f'drop 0 {2**15}', synced, f'drop {2**15} {2**15}']


def test_note_of_a_complete_window_survives_a_loss_of_power(
    disk: DiskWindows, on_disk: list[str]
) -> None:
    disk.note_complete(3)
    assert on_disk == ['sync complete.new', 'complete.new -> complete', 'sync /rank0']


def test_windows_that_are_set_aside_stay_so_after_a_loss_of_power(
    disk: DiskWindows, tmp_path: Path, on_disk: list[str]
) -> None:
    write(disk, tmp_path, 3)
    on_disk.clear()
    disk.set_aside_after(0, IDENTITY)
    assert on_disk == ['window-3-plan1.window -> aside-3-plan1.window', 'sync /rank0']


def test_unused_end_of_a_window_takes_no_space(disk: DiskWindows, tmp_path: Path) -> None:
    large = WindowFile.create(tmp_path / 'large', 2**24)
    large.begin(named(0))
    write_window(large)
    large.freeze()
    disk.write(large, IDENTITY)
    (stored,) = disk.stored()
    assert stored.path.stat().st_size == 2**24
    assert 0 < disk.used_bytes() < 2**20
    with WindowReader(stored.path) as reader:
        reader.verify_payloads(reader.verify_identity(Expected.of(IDENTITY, named(0))))


def test_next_process_finds_windows_and_no_leftovers(disk: DiskWindows, tmp_path: Path) -> None:
    write(disk, tmp_path, 0, 3)
    (disk.path / 'writing-6-plan1.window').write_bytes(b'cut off')
    disk.close()
    again = DiskWindows(tmp_path / 'disk', 'run1', 0)
    assert starts(again) == [3, 0]
    assert not list(disk.path.glob('writing-*'))
    assert starts(DiskWindows(tmp_path / 'disk', 'run1', 1)) == []


@pytest.mark.parametrize('offset', [3, 40_000 - 1, 65_536, 70_000, -200])
def test_damaged_byte_is_refused(offset: int, disk: DiskWindows, tmp_path: Path) -> None:
    (file,) = write(disk, tmp_path, 0)
    path = disk.stored()[0].path
    at = offset if offset >= 0 else file.used_bytes() + offset
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    try:
        back, _ = read(disk, tmp_path)
    except RefusedWindow as refusal:
        assert path.name in str(refusal) or 'back-0' in str(refusal)
    else:
        assert all((back.payload(s) == file.payload(s)).all() for s in range(WINDOW))
        assert offset == 40_000 - 1


@pytest.mark.parametrize('nbytes', [0, 100, 65_536, 70_000])
def test_torn_window_is_refused(nbytes: int, disk: DiskWindows, tmp_path: Path) -> None:
    write(disk, tmp_path, 0)
    os.truncate(disk.stored()[0].path, nbytes)
    with pytest.raises(TruncatedWindow):
        read(disk, tmp_path)


def test_renamed_window_is_refused(disk: DiskWindows, tmp_path: Path) -> None:
    write(disk, tmp_path, 0)
    os.rename(disk.stored()[0].path, disk.path / 'window-3-plan1.window')
    with pytest.raises(RefusedWindow):
        read(disk, tmp_path, 3)


def test_window_that_other_users_may_open_is_refused(disk: DiskWindows, tmp_path: Path) -> None:
    write(disk, tmp_path, 0)
    disk.stored()[0].path.chmod(0o644)
    with pytest.raises(UnreadableWindow, match='open to other users'):
        read(disk, tmp_path)


def test_window_that_changes_during_its_copy_is_discarded(
    disk: DiskWindows, tmp_path: Path
) -> None:
    file = make_file(tmp_path / 'memory', 0)
    file.payload(1)[5] ^= 1
    with pytest.raises(CorruptWindow, match='slot 1: checksum mismatch'):
        disk.write(file, IDENTITY)
    assert names(disk) == set()


@pytest.mark.parametrize('size', ['8k', '96k'], ids=['at once', 'on the way'])
def test_full_disk_keeps_its_windows(size: str, tmp_path: Path) -> None:
    """A tmpfs as the disk: it reports its free space, and has too little for the second window."""
    with mounted_tmpfs(tmp_path / 'full', size) as root:
        disk = DiskWindows(root, 'run1', 0)
        with pytest.raises(OSError, match='free, and a window takes|No space'):
            write(disk, tmp_path, 0, 3)
        with suppress(IndexError):
            assert disk.stored()[0].name == named(0)
        assert not list(disk.path.glob('writing-*'))
        disk.close()


def test_pruning_keeps_windows_newer_than_the_kept_ones(disk: DiskWindows, tmp_path: Path) -> None:
    """They may be all that is left of an earlier attempt that went further."""
    write(disk, tmp_path, 0, 3, 6, 9)
    disk.set_aside_after(6, IDENTITY)
    disk.prune([named(3), named(6)])
    kept = {'window-3-plan1.window', 'window-6-plan1.window'}
    assert names(disk) == {*kept, 'aside-9-plan1.window'}
    write(disk, tmp_path, 12)
    disk.prune([named(6), named(12)])
    assert starts(disk) == [12, 6] and not any(name.startswith('aside') for name in names(disk))


def test_windows_of_a_discarded_past_are_set_aside(disk: DiskWindows, tmp_path: Path) -> None:
    write(disk, tmp_path, 0, 3, 6)
    disk.set_aside_after(0, RankIdentity('another run', TOPOLOGY, 0))
    assert starts(disk) == [6, 3, 0]
    disk.set_aside_after(0, IDENTITY)
    assert starts(disk) == [0]
    assert {'aside-3-plan1.window', 'aside-6-plan1.window'} < names(disk)


def test_remove_deletes_all_files_at_the_end(disk: DiskWindows, tmp_path: Path) -> None:
    other = DiskWindows(tmp_path / 'disk', 'run1', 1)
    write(disk, tmp_path, 0)
    disk.remove(past=3)
    assert [path.name for path in (tmp_path / 'disk' / 'run1').iterdir()] == ['rank1']
    other.remove(past=3)
    assert list((tmp_path / 'disk').iterdir()) == []


def test_remove_keeps_windows_beyond_the_last_iteration(disk: DiskWindows, tmp_path: Path) -> None:
    write(disk, tmp_path, 0, 3, 6)
    disk.set_aside_after(0, IDENTITY)
    disk.remove(past=6)
    assert {name for name in names(disk) if name.endswith('.window')} == {'aside-6-plan1.window'}


def test_unusable_disk_directory_is_named_with_its_flag(tmp_path: Path) -> None:
    (tmp_path / 'file').touch()
    for root in (tmp_path / 'nowhere', tmp_path / 'file'):
        with pytest.raises(UserError, match='--sparse-ckpt-disk .* is no directory'):
            DiskWindows(root, 'run1', 0)
    (tmp_path / 'disk').mkdir()
    (tmp_path / 'disk' / 'run1').symlink_to(tmp_path)
    with pytest.raises(UserError, match='--sparse-ckpt-disk .* cannot be kept there'):
        DiskWindows(tmp_path / 'disk', 'run1', 0)
    with pytest.raises(UserError, match='--sparse-ckpt-run-id'):
        DiskWindows(tmp_path / 'disk', 'a/b', 0)


@pytest.mark.parametrize(
    ('file', 'directory', 'user', 'words'),
    [
        (0o777, 0o777, 0, 'mode -rwxrwxrwx'),
        (0o644, 0o755, 0, 'mode -rw-r--r--'),
        (0o600, 0o700, 65534, 'user 65534'),
        (0o600, 0o700, 0, None),
    ],
)
def test_file_system_without_modes_of_its_own_is_refused_as_such(
    file: int,
    directory: int,
    user: int,
    words: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if os.geteuid() != 0:
        pytest.skip('gives files to another user')
    opens, makes = os.open, os.mkdir

    def opened(path: str, flags: int, *args: Any, **more: Any) -> int:
        fd = opens(path, flags, *args, **more)
        if flags & (os.O_CREAT | os.O_TMPFILE & ~os.O_DIRECTORY):
            os.fchmod(fd, file)
            os.fchown(fd, user, user)
        return fd

    def made(path: Path, mode: int = 0o777) -> None:
        makes(path, mode)
        os.chmod(path, directory)
        os.chown(path, user, user)

    monkeypatch.setattr(os, 'open', opened)
    monkeypatch.setattr(os, 'mkdir', made)
    root = tmp_path / 'mounted'
    os.mkdir(root)
    monkeypatch.setattr(os, 'chmod', lambda path, mode: None)
    for look in (require_writable, lambda root: DiskWindows(root, 'run1', 0).close()):
        if words is None:
            look(root)
            continue
        with pytest.raises(
            UserError, match='--sparse-ckpt-disk .*its file system.*: mount'
        ) as said:
            look(root)
        assert words in str(said.value) and '--sparse-ckpt-dir' not in str(said.value)
