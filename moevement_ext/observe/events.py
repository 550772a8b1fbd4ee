# SPDX-License-Identifier: Apache-2.0
"""Events of a run as JSON lines, one file per rank."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec


class EventLog:
    """Appends one JSON object per line; every line is complete even if the process dies next.

    Safe to call from any thread.

    Args:
        directory: `--sparse-ckpt-events`, or None: nothing is written.
        rank: global rank of this process.
    """

    def __init__(self, directory: str | None, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._file = None
        self.iteration = 0
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            path = Path(directory) / f'rank{rank}.jsonl'
            self._file = open(path, 'ab', buffering=0)

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event with time (seconds since the epoch), rank, pid and iteration."""
        if self._file is None:
            return
        line = {
            'time': time.time(),
            'event': event,
            'rank': self._rank,
            'pid': os.getpid(),
            'iteration': self.iteration,
            **fields,
        }
        with self._lock:
            self._file.write(msgspec.json.encode(line) + b'\n')

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
