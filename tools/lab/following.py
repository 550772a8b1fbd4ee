# SPDX-License-Identifier: Apache-2.0
"""Reads the events of a running job incrementally."""

from pathlib import Path

import msgspec

from moevement_ext.events import Event, decode
from tools.lab.errors import LabError


class FollowedFile:
    """Reads the complete lines appended to a file of events since the last look.

    Args:
        path: path of the file, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0  # bytes of complete lines

    def look(self) -> list[Event]:
        """Read on; returns the new events."""
        if not self._path.exists():
            return []
        with self._path.open('rb') as file:
            file.seek(self._read)
            lines = file.read()
        whole = lines[: lines.rfind(b'\n') + 1]
        self._read += len(whole)
        return list(decode(whole))


class Follower:
    """Reads the events appended in a folder since the last look.

    Args:
        folder: folder of `--sparse-ckpt-events`.

    Attributes:
        events: all events so far, in the order of time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, FollowedFile] = {}
        self.events: list[Event] = []

    def look(self) -> list[Event]:
        """Read on; returns the new events in the order of time.

        Raises:
            LabError: the folder is missing, or has files of another kind.
        """
        if not self._folder.is_dir():
            raise LabError(f'{self._folder}: no such folder; give that of --sparse-ckpt-events')
        try:
            paths = sorted(self._folder.glob('rank*.jsonl'))
            files = [self._files.setdefault(path, FollowedFile(path)) for path in paths]
            new = [event for file in files for event in file.look()]
        except (OSError, msgspec.MsgspecError) as error:
            raise LabError(
                f'{self._folder}: a file rank<N>.jsonl holds no events: {error}; give the folder '
                'of --sparse-ckpt-events'
            ) from error
        if new:
            self.events = sorted([*self.events, *new], key=lambda event: event.time)
        return sorted(new, key=lambda event: event.time)


def read_events(folder: Path) -> list[Event]:
    """All events of a run in the order of time; a job that ended early may not have the folder."""
    return Follower(folder).look() if folder.is_dir() else []
