# SPDX-License-Identifier: Apache-2.0
"""Events of a job that goes on writing them."""

from pathlib import Path

import msgspec

from moevement_ext.events import Event, decode
from tools.lab.errors import LabError


class Follower:
    """Reads what was appended since it last looked.

    Args:
        folder: of `--sparse-ckpt-events`.

    Attributes:
        events: all so far, in the order of time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes of complete lines
        self.events: list[Event] = []

    def look(self) -> list[Event]:
        """Read on; returns what was new, in the order of time.

        Raises:
            LabError: the folder is not there, or holds something else.
        """
        if not self._folder.is_dir():
            raise LabError(f'{self._folder}: no such folder; give that of --sparse-ckpt-events')
        try:
            paths = sorted(self._folder.glob('rank*.jsonl'))
            new = [event for path in paths for event in self._next(path)]
        except (OSError, msgspec.MsgspecError) as error:
            raise LabError(
                f'{self._folder}: a file rank<N>.jsonl holds no events: {error}; give the folder '
                'of --sparse-ckpt-events'
            ) from error
        if new:
            self.events = sorted([*self.events, *new], key=lambda event: event.time)
        return sorted(new, key=lambda event: event.time)

    def _next(self, path: Path) -> list[Event]:
        with path.open('rb') as file:
            file.seek(self._read.get(path, 0))
            lines = file.read()
        whole = lines[: lines.rfind(b'\n') + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        return list(decode(whole))
