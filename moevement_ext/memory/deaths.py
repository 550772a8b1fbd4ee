# SPDX-License-Identifier: Apache-2.0
"""Which process of a run died when, on one node; noted by the processes that watch them.

The whole job may start again because one process died, and torchrun tells the new ones neither
which nor when. So each watchdog (`process/watchdog_process.py`, which imports nothing of this)
appends a line to a file in the run's directory, and the next life of the job reads it.
"""

from contextlib import suppress
from pathlib import Path

import msgspec

FILE = 'deaths.jsonl'
"""In `NodeStore.shared`."""


class Death(msgspec.Struct, frozen=True, order=True):
    """The end of a process; the first one comes first in order."""

    time: float
    """Seconds since the epoch."""
    rank: int
    pid: int


_DEATH = msgspec.json.Decoder(Death)


def noted(shared: Path) -> list[Death]:
    """The newest note of each rank on this node; a line that is damaged is passed over."""
    newest: dict[int, Death] = {}
    with suppress(OSError):
        for line in (shared / FILE).read_bytes().splitlines():
            with suppress(msgspec.DecodeError):
                death = _DEATH.decode(line)
                newest[death.rank] = death
    return list(newest.values())


def forget(shared: Path) -> None:
    """Another life begins."""
    with suppress(OSError):
        (shared / FILE).unlink(missing_ok=True)
