# SPDX-License-Identifier: Apache-2.0
"""Lines that workers print: passed on with a prefix, or read from their log."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from moevement_ext.process.terminal import highlighted

_CHUNK = 1 << 16
_LAST_LINES = 15
_LONGEST_LINE = 1 << 16
"""Bars of progress end no line for days."""
_KEPT_OF_A_LINE = 2000
"""For a person to read, and to fit a message under Slurm."""
_MOST_CHUNKS = 64
"""More than a pipe holds; what a dead worker has started may go on to write into it."""


class _Lines:
    """Bytes as they come, cut into lines."""

    def __init__(self) -> None:
        self._rest = b''

    def split(self, chunk: bytes) -> list[str]:
        *whole, self._rest = (self._rest + chunk).split(b'\n')
        if len(self._rest) > _LONGEST_LINE:
            whole, self._rest = [*whole, self._rest], b''
        return [line.decode(errors='replace') for line in whole]

    def flush(self) -> list[str]:
        return self.split(b'\n') if self._rest else []


class Relay:
    """Prints on stdout what comes out of a pipe, line by line, with a prefix.

    Args:
        fd: read end of the pipe; stays the caller's.
        prefix: of each line.
        on_line: called with each line, without the prefix.
    """

    def __init__(self, fd: int, prefix: str, on_line: Callable[[str], None]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._prefix = prefix
        self._on_line = on_line
        self._lines = _Lines()
        self._last: deque[str] = deque(maxlen=_LAST_LINES)

    @property
    def last_lines(self) -> list[str]:
        """The newest lines, long ones cut off."""
        return list(self._last)

    def pump(self) -> bool:
        """Pass on one chunk; False if there is nothing (more)."""
        try:
            chunk = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return False
        self._print(self._lines.split(chunk))
        return bool(chunk)

    def finish(self) -> None:
        """Pass on all that is left; the writer is gone."""
        for _ in range(_MOST_CHUNKS):
            if not self.pump():
                break
        self._print(self._lines.flush())

    def _print(self, lines: list[str]) -> None:
        if lines:
            say(sys.stdout, ''.join(f'{self._prefix}{line}\n' for line in lines))
        self._last.extend(line[:_KEPT_OF_A_LINE] for line in lines)
        for line in lines:
            self._on_line(line)


def say(stream: TextIO, text: str) -> None:
    """Print text; a full disk or a closed terminal is no reason to end a job."""
    with suppress(OSError, ValueError):  # the latter: closed, or of another encoding
        stream.write(text)
        stream.flush()


def say_of_launcher(what: object, good: bool | None = None) -> None:
    """A line of a launcher on stderr, with the time of day.

    Args:
        what: it says.
        good: stands out on a terminal, as good news or bad; None: as any other line.
    """
    line = f'[launcher {time.strftime("%H:%M:%S")}] {what}'
    say(sys.stderr, (line if good is None else highlighted(line, sys.stderr, good)) + '\n')


def last_lines(log: Path) -> list[str]:
    """The newest lines of a log; none if there is no such file."""
    if not log.exists():
        return []
    with log.open('rb') as file:
        file.seek(max(log.stat().st_size - _CHUNK, 0))
        return file.read().decode(errors='replace').splitlines()[-_LAST_LINES:]


class LogTail:
    """Reads what is appended to a log from now on.

    Args:
        path: need not exist yet; what it has already is passed over.
        on_line: called with each line.
    """

    def __init__(self, path: Path, on_line: Callable[[str], None]) -> None:
        self._path = path
        self._on_line = on_line
        self._lines = _Lines()
        self._offset = path.stat().st_size if path.exists() else 0

    def pump(self) -> None:
        """Pass on what is new."""
        if not self._path.exists():
            return
        with self._path.open('rb') as log:
            log.seek(self._offset)
            chunk = log.read()
        self._offset += len(chunk)
        for line in self._lines.split(chunk):
            self._on_line(line)
