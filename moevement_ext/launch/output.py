# SPDX-License-Identifier: Apache-2.0
"""Output of workers: relayed with a prefix, or read from their logs."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from moevement_ext.logger import highlighted

_CHUNK = 1 << 16
_STDERR = 2
_LAST_LINES = 15
# Bytes; longer lines are split. Progress bars print no newline for days.
_LONGEST_LINE = 1 << 16
# Characters kept of each line: readable, and short enough for a message of the agent.
_KEPT_OF_A_LINE = 2000
# More than the capacity of a pipe. Bounded, as children of a dead worker may continue to write.
_MOST_CHUNKS = 64


class _Lines:
    """Splits a stream of bytes into lines."""

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
    """Copies a pipe to stdout line by line, with a prefix; `on_line` gets lines without it.

    The caller closes the pipe's read end `fd`.
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
        """The newest lines; long lines are truncated."""
        return list(self._last)

    def pump(self) -> bool:
        """Copy one chunk; False if the pipe is empty or closed."""
        try:
            chunk = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return False
        self._print(self._lines.split(chunk))
        return bool(chunk)

    def finish(self) -> None:
        """Copy the rest of the pipe after the worker's end."""
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
    """Print text; ignores errors, as a full disk or a closed terminal must not end the job."""
    with suppress(OSError, ValueError):  # ValueError: stream closed, or another encoding
        stream.write(text)
        stream.flush()


def say_from_handler(what: str) -> None:
    """Print a line of the launcher on stderr from a signal handler, which may interrupt `say`."""
    with suppress(OSError):
        os.write(_STDERR, f'{_of_launcher(what)}\n'.encode())


def say_of_launcher(what: object, good: bool | None = None) -> None:
    """Print a line of the launcher on stderr, with the time of day.

    `good` colours the line on a terminal as good or bad news; None: no colour.
    """
    line = _of_launcher(what)
    say(sys.stderr, (line if good is None else highlighted(line, sys.stderr, good)) + '\n')


def _of_launcher(what: object) -> str:
    return f'[launcher {time.strftime("%H:%M:%S")}] {what}'


def last_lines(log: Path) -> list[str]:
    """Return the newest lines of a log; empty if it cannot be read."""
    with suppress(OSError), log.open('rb') as file:
        file.seek(max(log.stat().st_size - _CHUNK, 0))
        return file.read().decode(errors='replace').splitlines()[-_LAST_LINES:]
    return []


def give_up_unwritten() -> None:
    """Drop output that cannot be written; at its exit, Python would fail with status 120."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by the caller
        try:
            stream.flush()
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)


class LogTail:
    """Reads the lines that are appended to a log, which need not exist yet, from now on.

    A log that cannot be read at the moment, such as one on a network file system that has lost its
    server, is read later.
    """

    def __init__(self, path: Path, on_line: Callable[[str], None]) -> None:
        self._path = path
        self._on_line = on_line
        self._lines = _Lines()
        self._offset = path.stat().st_size if path.exists() else 0

    def pump(self) -> None:
        chunk = b''
        with suppress(OSError), self._path.open('rb') as log:
            log.seek(self._offset)
            chunk = log.read()
        self._offset += len(chunk)
        for line in self._lines.split(chunk):
            self._on_line(line)
