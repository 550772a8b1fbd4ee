# SPDX-License-Identifier: Apache-2.0
"""Reads the events of a running job incrementally."""

import os
from pathlib import Path

import msgspec

from moevement_ext.events import Event, decode

from .programs import LabError


class FollowedFile:
    """Reads the complete lines appended to a file of events, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._read = 0  # bytes of complete lines
        self.events: list[Event] = []
        """All events read from the present file."""

    def read_new(self) -> list[Event]:
        """Read appended lines, or the whole file if it was replaced; returns the new events."""
        if not self._path.exists():
            self.events, self._read = [], 0
            return []
        with self._path.open('rb') as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._read:
                self.events, self._read, self._inode = [], 0, status.st_ino
            file.seek(self._read)
            lines = file.read()
        whole = lines[: lines.rfind(b'\n') + 1]
        try:
            new = list(decode(whole))
        except msgspec.MsgspecError as error:
            raise LabError(
                f'{self._path} holds something else than events: {error}; give the folder of '
                '--sparse-ckpt-events'
            ) from error
        self._read += len(whole)
        self.events += new
        return new


class Follower:
    """Reads the events appended in a folder of `--sparse-ckpt-events`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, FollowedFile] = {}
        self.events: list[Event] = []
        """All events so far, in the order of time."""

    def read_new(self) -> list[Event]:
        """Read appended events; returns them in the order of time."""
        if not self._folder.is_dir():
            raise LabError(f'{self._folder}: no such folder; give that of --sparse-ckpt-events')
        try:
            for path in sorted(self._folder.glob('rank*.jsonl')):
                self._files.setdefault(path, FollowedFile(path))
            new = [event for file in self._files.values() for event in file.read_new()]
        except OSError as error:
            raise LabError(f'{error.filename or self._folder}: {error.strerror}') from error
        if new:
            events = (event for file in self._files.values() for event in file.events)
            self.events = sorted(events, key=lambda event: event.time)
        return sorted(new, key=lambda event: event.time)


def read_events(folder: Path) -> list[Event]:
    """All events of a run in the order of time; a job that ended early may not have the folder."""
    return Follower(folder).read_new() if folder.is_dir() else []
