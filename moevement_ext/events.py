# SPDX-License-Identifier: Apache-2.0
"""Events of a run as JSON lines, one file per rank."""

import logging
import os
import threading
import time
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger(__name__)


class EventLog:
    """Appends one JSON object per line; every line is complete even if the process dies next.

    Safe to call from any thread. A file system that refuses a line (full, gone) ends the log with
    a warning and never the training (invariant I6).

    Args:
        directory: `--sparse-ckpt-events`, or None: nothing is written.
        rank: global rank of this process.
    """

    def __init__(self, directory: str | None, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self.iteration = 0
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._file = FileIO(Path(directory) / f'rank{rank}.jsonl', 'ab')

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event with time (seconds since the epoch), rank, pid and iteration."""
        line = {
            'time': time.time(),
            'event': event,
            'rank': self._rank,
            'pid': os.getpid(),
            'iteration': self.iteration,
            **fields,
        }
        with self._lock:
            if self._file is not None:
                self._write(self._file, msgspec.json.encode(line) + b'\n')

    def close(self) -> None:
        """Close the file; what comes later is not written."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, file: FileIO, line: bytes) -> None:
        try:
            if file.write(line) == len(line):  # one system call: whole lines under SIGKILL
                return
            problem = 'the last line is cut off; is the file system full?'
        except OSError as error:
            problem = str(error)
        logger.warning('no more events are written to %s: %s', file.name, problem)
        file.close()
        self._file = None
