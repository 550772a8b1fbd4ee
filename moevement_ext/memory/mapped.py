# SPDX-License-Identifier: Apache-2.0
"""Files in host memory that are mapped with all their pages there.

A write to a mapped page that a full tmpfs cannot give kills the process with SIGBUS, and a fault
per page slows down the first pass over it. So a file has its final size, its pages reserved and its
page tables filled before anything is written to it, or it is refused.
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
        HostMemoryError: the file system has not that much left; nothing stays behind.
        FileExistsError: there is a file of that name.
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
    """Map a file for another use: it gets `nbytes` bytes and is made if it is not there.

    Pages that it has are used again rather than given back and zeroed, so it holds anything.

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
    """Map the whole of a file as it is; to be written to, with the holes that a copy of it has.

    Raises:
        ValueError: it is empty.
        ForeignFileError: it is not this user's own.
        HostMemoryError: it has holes, and the file system no room for them.
        OSError: it cannot be opened or mapped.
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
    """Have the pages of a file that somebody else will map there; it is made, or keeps its content.

    Args:
        path: the file.
        nbytes: its size at least.

    Raises:
        HostMemoryError: the file system has not that much left, or the file is not this user's own;
            no empty one stays behind.
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
    """Give the open file its final size with all pages reserved, and map it."""
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
