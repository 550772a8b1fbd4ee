# SPDX-License-Identifier: Apache-2.0
"""Mapped files in host memory with reserved pages.

A write to a mapped page that a full tmpfs cannot provide kills the process with SIGBUS, and a fault
per page slows down the first pass over the file. So before the first write a file gets its final
size, reserved pages and filled page tables, or is refused. A file may have pages in its first part
only, and get or give back pages while it is mapped.

Pages are reserved by writing to the map, in one pass. On a tmpfs with `huge=advise` or
`huge=within_size` these are huge pages, which take a tenth of the time. Kernels before Linux 5.14
cannot reserve pages in this way.
"""

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moevement_ext.errors import HostMemoryError
from moevement_ext.logger import logger_of
from moevement_ext.memory import private_file
from moevement_ext.memory.file_system import NO_SPACE_REMEDY, free_bytes

logger = logger_of(__name__)

Bytes = npt.NDArray[np.uint8]
"""A part of a mapped file, shape [bytes]."""

_NO_SPACE = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


# Unit of `st_blocks`.
_BLOCK_BYTES = 512
# Maps made in advance, by device and inode number of their file.
_prepared: dict[tuple[int, int], mmap.mmap] = {}

_MADV_REMOVE, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 9, 14, 23
# The kernel holds up `mmap` calls of other threads while it fills a range.
_STEP_BYTES = 64 * 2**20


def map_new(path: Path, nbytes: int, reserved: int | None = None) -> mmap.mmap:
    """Create a file of `nbytes` zeros, the first `reserved` (None: all) with pages, and map it.

    Raises `HostMemoryError` without space, and leaves no file, or `FileExistsError`.
    """
    with private_file.opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        try:
            return _reserved(fd, nbytes, path, reserved)
        except BaseException:
            path.unlink()
            raise


def map_anew(
    path: Path, nbytes: int, reserved: int | None = None, create: bool = True
) -> mmap.mmap:
    """Map a file for a new use: resize it to `nbytes` bytes or, if `create`, create it.

    Existing pages are reused without zeroing, so the content is arbitrary. The first `reserved`
    bytes (None: all) get pages. Raises `HostMemoryError` without space, and for a foreign file.
    """
    with private_file.opened(path, os.O_RDWR | (os.O_CREAT if create else 0)) as fd:
        former = min(os.fstat(fd).st_size, nbytes)
        os.ftruncate(fd, former)
        try:
            return _reserved(fd, nbytes, path, reserved)
        except HostMemoryError:
            os.ftruncate(fd, former)  # frees the pages reserved beyond the former size
            raise


def map_existing(path: Path, writable: bool = False, reserved: int | None = None) -> mmap.mmap:
    """Map an existing file as a whole; `ValueError` if it is empty, and errors as of `open_file`.

    If `writable`, fill the holes that a copied file has before byte `reserved` (None: all), or
    raise `HostMemoryError` without space.
    """
    with private_file.opened(path, os.O_RDWR if writable else os.O_RDONLY) as fd:
        if not writable:
            return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        found = os.fstat(fd)
        wanted = found.st_size if reserved is None else min(reserved, found.st_size)
        if found.st_blocks * _BLOCK_BYTES < found.st_size:  # otherwise the file has no holes
            _check_free(fd, wanted, path)
        mapped = _map(fd, found.st_size)
        reserve_range(np.frombuffer(mapped, np.uint8), path, 0, wanted)
        return mapped


def prepare_map(path: Path, nbytes: int, reserved: int) -> None:
    """Do the work of `map_anew` in advance; its next call takes over this map. Any thread."""
    mapped, status = map_anew(path, nbytes, reserved), path.stat()
    _prepared[status.st_dev, status.st_ino] = mapped


def prepare_map_of_existing(path: Path) -> None:
    """Do the work of a writable `map_existing` in advance; reserves no pages. Any thread."""
    status = path.stat()
    mapped = map_existing(path, writable=True, reserved=status.st_blocks * _BLOCK_BYTES)
    _prepared[status.st_dev, status.st_ino] = mapped


def forget_prepared_maps() -> None:
    """Unmap the prepared maps that no call has taken over."""
    _prepared.clear()


def _map(fd: int, nbytes: int) -> mmap.mmap:
    """Map a file for writing, or take over its prepared map if that has the same size."""
    status = os.fstat(fd)
    mapped = _prepared.pop((status.st_dev, status.st_ino), None)
    return mapped if mapped is not None and len(mapped) == nbytes else mmap.mmap(fd, nbytes)


def map_first(path: Path, nbytes: int) -> mmap.mmap:
    """Map the first `nbytes` of a file for writing, with pages reserved; `ValueError` if smaller.

    Further errors as of `private_file.open_file` and `reserve_range`.
    """
    with private_file.opened(path, os.O_RDWR) as fd:
        mapped = mmap.mmap(fd, nbytes)
    reserve_range(np.frombuffer(mapped, np.uint8), path, 0, nbytes)
    return mapped


def reserve_range(array: Bytes, path: Path, begin: int, end: int) -> None:
    """Reserve the pages of bytes `begin` to `end` of a writable map, and fill the page tables.

    Any thread. Existing pages keep their content. Raises `HostMemoryError` without space; pages
    reserved so far stay reserved.
    """
    begin, end = begin // mmap.PAGESIZE * mmap.PAGESIZE, min(in_pages(end), in_pages(array.size))
    if begin >= end:
        return
    _advise(array, begin, end, _MADV_HUGEPAGE)  # an error means no huge pages
    for at in range(begin, end, _STEP_BYTES):
        failed = _advise(array, at, min(at + _STEP_BYTES, end), _MADV_POPULATE_WRITE)
        if failed == errno.EINVAL:  # a kernel before 5.14
            _allocate(path, at, min(at + _STEP_BYTES, end))
        elif failed:
            raise _no_space(path, end, free_bytes(path.parent))


def release_range(array: Bytes, begin: int, end: int) -> None:
    """Give back whole pages from `begin` to `end` of a writable map; readers find zeros there."""
    begin, end = in_pages(begin), in_pages(min(end, array.size))
    if begin < end and (failed := _advise(array, begin, end, _MADV_REMOVE)):
        _log_kept(failed)


@functools.cache
def _log_kept(failed: int) -> None:
    """Log once that freed pages stay in use, e.g. as they are locked; they no longer count."""
    logger.warning(
        'host memory that is given back stays in use (MADV_REMOVE: %s): --sparse-ckpt-dir must be '
        'in a tmpfs, and the process must not lock its memory (mlockall)',
        os.strerror(failed),
    )


def in_pages(nbytes: int) -> int:
    """Size of a file of `nbytes` in a tmpfs, in whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _reserved(fd: int, nbytes: int, path: Path, reserved: int | None) -> mmap.mmap:
    """Resize the open file, map it, and reserve its first pages."""
    wanted = nbytes if reserved is None else min(reserved, nbytes)
    _check_free(fd, wanted, path)
    with _no_space_named(path, nbytes):
        os.ftruncate(fd, nbytes)
    mapped = _map(fd, nbytes)
    array = np.frombuffer(mapped, np.uint8)
    reserve_range(array, path, 0, wanted)
    release_range(array, wanted, nbytes)  # of an earlier use
    return mapped


def _check_free(fd: int, nbytes: int, path: Path) -> None:
    free = free_bytes(path.parent)
    if nbytes - os.fstat(fd).st_blocks * _BLOCK_BYTES > free:
        raise _no_space(path, nbytes, free)


def _allocate(path: Path, begin: int, end: int) -> None:
    with private_file.opened(path, os.O_RDWR) as fd, _no_space_named(path, end):
        os.posix_fallocate(fd, begin, end - begin)


@contextmanager
def _no_space_named(path: Path, nbytes: int) -> Iterator[None]:
    """Raise a `HostMemoryError` instead of an error of the system about missing space."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise _no_space(path, nbytes, free_bytes(path.parent)) from error


def _advise(array: Bytes, begin: int, end: int, advice: int) -> int:
    """Call madvise(2) without the interpreter's lock; returns its error number, 0 if none."""
    if _libc.madvise(array.ctypes.data + begin, end - begin, advice) == 0:
        return 0
    return ctypes.get_errno()


def _no_space(path: Path, nbytes: int, free: int) -> HostMemoryError:
    return HostMemoryError(
        f'cannot reserve {nbytes} bytes for {path.name} in {path.parent}: {free} bytes free '
        f'(or a file size limit is set, see ulimit -f). {NO_SPACE_REMEDY}'
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
