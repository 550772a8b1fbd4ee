# SPDX-License-Identifier: Apache-2.0
"""Mapped files in host memory with all pages reserved.

A write to a mapped page that a full tmpfs cannot provide kills the process with SIGBUS, and a fault
per page slows down the first pass over the file. So before the first write a file gets its final
size, reserved pages and filled page tables, or is refused.
"""

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory import private
from moevement_ext.memory.budget import NO_SPACE_REMEDY, free_bytes

Bytes = npt.NDArray[np.uint8]
"""A part of a mapped file, shape [bytes]."""

_NO_SPACE = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def map_new(path: Path, nbytes: int) -> mmap.mmap:
    """Create a file of `nbytes` bytes, all zero, and map it.

    Raises:
        HostMemoryError: the file system is too full; no file is left behind.
        FileExistsError: a file of that name exists.
    """
    fd = private.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        return _reserved(fd, nbytes, path)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(fd)


def map_anew(path: Path, nbytes: int) -> mmap.mmap:
    """Map a file for a new use: resize it to `nbytes` bytes, or create it.

    Existing pages are reused without zeroing, so the content is arbitrary.

    Raises:
        HostMemoryError: the file system has not that much left, or the file is not this user's own.
    """
    fd = private.open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, min(os.fstat(fd).st_size, nbytes))
        return _reserved(fd, nbytes, path)
    finally:
        os.close(fd)


def map_existing(path: Path, writable: bool = False) -> mmap.mmap:
    """Map an existing file as a whole; if `writable`, fill the holes that a copied file has.

    Raises:
        ValueError: the file is empty.
        ForeignFileError: the file is not this user's own.
        HostMemoryError: the file system has no space to fill the holes.
        OSError: the file cannot be opened or mapped.
    """
    fd = private.open_file(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        found = os.fstat(fd)
        if writable and found.st_blocks * 512 < found.st_size:
            _reserve(fd, found.st_size, path)
        if writable:
            return mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)


def reserve(path: Path, nbytes: int) -> None:
    """Reserve the pages of a file that another process will map; existing content stays.

    Args:
        path: the file.
        nbytes: minimum size of the file.

    Raises:
        HostMemoryError: the file system is too full, or the file is not this user's own; no empty
            file is left behind.
    """
    fd = private.open_file(path, os.O_RDWR | os.O_CREAT)
    found = os.fstat(fd).st_size
    try:
        _reserve(fd, max(found, nbytes), path)
    except BaseException:
        if not found:
            path.unlink()
        raise
    finally:
        os.close(fd)


def _reserved(fd: int, nbytes: int, path: Path) -> mmap.mmap:
    """Resize the open file, reserve all its pages, and map it."""
    _reserve(fd, nbytes, path)
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _reserve(fd: int, nbytes: int, path: Path) -> None:
    missing = nbytes - os.fstat(fd).st_blocks * 512
    free = free_bytes(path.parent)
    if missing > free:
        raise _no_space(path, nbytes, free)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise _no_space(path, nbytes, free_bytes(path.parent)) from error


def _no_space(path: Path, nbytes: int, free: int) -> HostMemoryError:
    return HostMemoryError(
        f'cannot reserve {nbytes} bytes for {path.name} in {path.parent}: {free} bytes free '
        f'(or a file size limit is set, see ulimit -f). {NO_SPACE_REMEDY}'
    )
