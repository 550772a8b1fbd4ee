# SPDX-License-Identifier: Apache-2.0
import errno
import os
import shutil
from collections.abc import Callable
from mmap import PAGESIZE, mmap
from pathlib import Path

import numpy as np
import pytest

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory import mapped_file
from moevement_ext.memory.mapped_file import (
    map_anew,
    map_existing,
    map_new,
    release_range,
    reserve_range,
)

SIZE = 2**16


def reserved(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_new_file_is_zero_and_fully_reserved(shm: Path) -> None:
    assert map_new(shm / 'file', SIZE)[:] == bytes(SIZE)
    assert (shm / 'file').stat().st_size == SIZE <= reserved(shm / 'file')


def test_existing_file_is_not_replaced(shm: Path) -> None:
    map_new(shm / 'file', SIZE)[:4] = b'data'
    with pytest.raises(FileExistsError):
        map_new(shm / 'file', SIZE)
    assert map_existing(shm / 'file')[:4] == b'data'


@pytest.mark.parametrize('size', [SIZE // 2, SIZE, 2 * SIZE])
def test_pages_are_reused_for_any_size(shm: Path, size: int) -> None:
    map_new(shm / 'file', SIZE)[:] = b'x' * SIZE
    before = (shm / 'file').stat().st_ino
    again = map_anew(shm / 'file', size)
    assert len(again) == (shm / 'file').stat().st_size == size <= reserved(shm / 'file')
    assert again[:] == b'x' * min(size, SIZE) + bytes(max(0, size - SIZE))
    assert (shm / 'file').stat().st_ino == before


@pytest.mark.parametrize('map_file', [map_new, map_anew])
def test_size_beyond_the_file_system_is_refused(
    shm: Path, map_file: Callable[[Path, int], mmap]
) -> None:
    total = shutil.disk_usage(shm).total
    with pytest.raises(HostMemoryError, match=f'cannot reserve {total + 1} bytes for file in'):
        map_file(shm / 'file', total + 1)
    assert map_file is map_anew or not (shm / 'file').exists()


@pytest.mark.parametrize('kernel', ['present', 'before 5.14'])
def test_space_taken_meanwhile_is_refused(
    kernel: str, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said = errno.EINVAL if kernel != 'present' else errno.EFAULT
    monkeypatch.setattr(mapped_file, '_advise', lambda *_: said)
    monkeypatch.setattr(os, 'posix_fallocate', full)
    with pytest.raises(HostMemoryError, match=f'cannot reserve {SIZE} bytes for file in'):
        map_new(shm / 'file', SIZE)
    assert not (shm / 'file').exists()
    former = shm / 'former'
    former.touch(mode=0o600)
    former.write_bytes(bytes(PAGESIZE))
    with pytest.raises(HostMemoryError):
        map_anew(former, SIZE)
    assert former.stat().st_size == PAGESIZE


def test_old_kernel_falls_back_to_fallocate(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file, '_advise', lambda *_: errno.EINVAL)
    assert map_new(shm / 'file', SIZE)[:] == bytes(SIZE)
    assert reserved(shm / 'file') == SIZE


def test_ranges_of_a_file_are_reserved_and_released(shm: Path) -> None:
    array = np.frombuffer(map_new(shm / 'file', SIZE, SIZE // 4), np.uint8)
    sizes = [reserved(shm / 'file')]
    array[: SIZE // 4] = 7
    reserve_range(array, shm / 'file', SIZE // 4, SIZE)
    sizes.append(reserved(shm / 'file'))
    array[SIZE // 4 :] = 8
    release_range(array, SIZE // 2 + 1, SIZE)  # the page at the start stays
    sizes.append(reserved(shm / 'file'))
    assert sizes == [SIZE // 4, SIZE, SIZE // 2 + PAGESIZE]
    assert (shm / 'file').stat().st_size == SIZE
    parts = [array[: SIZE // 4], array[SIZE // 4 : SIZE // 2 + PAGESIZE]]
    assert [set(part.tolist()) for part in parts] == [{7}, {8}]
    assert not array[SIZE // 2 + PAGESIZE :].any()


def test_pages_that_cannot_be_freed_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mapped_file._log_kept.cache_clear()
    monkeypatch.setattr(mapped_file, '_advise', lambda *_: errno.EINVAL)
    for _ in range(2):
        mapped_file.release_range(np.zeros(2 * PAGESIZE, np.uint8), 0, PAGESIZE)
    (record,) = caplog.records
    assert 'Invalid argument' in record.getMessage()
    mapped_file._log_kept.cache_clear()
