# SPDX-License-Identifier: Apache-2.0
"""Append-only file of lines that survive the death of the writing process."""

import errno
import math
import os
import tempfile
import threading
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path

from moevement_ext.logger import logger_of

logger = logger_of(__name__)

# Beginning of every line.
_BEGINS = b'{"time":'
# Bytes read at once to find the end of the last whole line.
_TAIL = 1 << 16
# Pause after an error that may be temporary, such as a full file system.
_PAUSE_S = 60.0


def probe(directory: Path) -> os.stat_result:
    """Raise `OSError` unless files, or the directory itself, could be created; creates nothing.

    Returns the status of a file that was created with mode 0600 for a moment.
    """
    while not directory.exists():
        directory = directory.parent
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno())
    except OSError as error:  # without the name of the file, which differs between ranks
        raise OSError(error.errno, error.strerror, str(directory)) from error


def _to_append(path: Path) -> FileIO:
    """Open a file for appending after its last complete line.

    A line truncated by SIGKILL, a full file system or a power loss would merge with the first
    new line, and neither would be readable. Raises `OSError` if the file cannot be opened, or
    is no event file that this user may change.
    """
    file = FileIO(str(path), 'a+', opener=_open_own)
    if file.seekable():
        size = file.seek(0, os.SEEK_END)
        end, whole = size, 0
        while end and not whole:
            begin = max(end - _TAIL, 0)
            newline = os.pread(file.fileno(), end - begin, begin).rfind(b'\n')
            whole = 0 if newline < 0 else begin + newline + 1
            end = begin
        if whole < size:
            _check_cut_off(file, whole)
            file.truncate(whole)
    return file


def _open_own(path: str, flags: int) -> int:
    """Open without following links, which another user may have placed."""
    mode = 0o666
    try:
        return os.open(path, flags | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno != errno.ELOOP or os.lstat(path).st_uid not in (0, os.geteuid()):
            raise
    return os.open(path, flags, mode)


def _check_cut_off(file: FileIO, begin: int) -> None:
    """Check that the cut-off bytes are part of an event, or zeros after a power loss."""
    found = os.pread(file.fileno(), len(_BEGINS), begin)
    if not (_BEGINS.startswith(found) or found.startswith(b'\0')):
        file.close()
        raise FileExistsError(errno.EEXIST, 'it holds something else than events', str(file.name))


class EventFile:
    """Appends one JSON object per line; a written line survives the death of the process.

    The next process that opens the file removes a truncated last line. Creates the directory.
    Thread-safe. If a write fails, a warning is logged and the lines of the next minute are dropped;
    training continues. Raises `OSError` if the file is not writable.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._path = path
        self._file: FileIO | None = _to_append(path)
        self._again_at = 0.0
        self._failed = False

    def append(self, line: bytes) -> None:
        with self._lock:
            try:
                if self._file is None and time.monotonic() >= self._again_at:
                    self._file = _to_append(self._path)
                if self._file is not None:
                    self._write(self._file, line)
            except OSError as error:
                self._pause(error)

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        with self._lock:
            self._again_at = math.inf
            self._close()

    def _write(self, file: FileIO, line: bytes) -> None:
        if file.write(line) != len(line):  # one system call; SIGKILL may interrupt it
            raise OSError('the last line is cut off; is the file system full?')
        self._failed = False

    def _pause(self, error: OSError) -> None:
        """Drop lines for a while, not for the rest of a job that may run for weeks."""
        if not self._failed:
            self._failed = True
            logger.warning('events are not written to %s at present: %s', self._path, error)
        self._close()
        self._again_at = time.monotonic() + _PAUSE_S

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # some file systems report only now that they are full
                file.close()
