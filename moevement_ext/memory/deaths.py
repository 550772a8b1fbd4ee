# SPDX-License-Identifier: Apache-2.0
"""Deaths of a run's processes on one node, recorded by their watchdogs.

After a death the whole job may restart, and torchrun tells the new processes neither which process
died nor when. Each watchdog (`system/watchdog_process.py`, which does not import this module)
appends a line to a file in the run's directory; the restarted job reads it.
"""

from contextlib import suppress
from pathlib import Path

import msgspec

FILE = 'deaths.jsonl'
"""Name of the file in `NodeStore.shared`."""


class Death(msgspec.Struct, frozen=True, order=True):
    """The death of a process; sorts by time."""

    time: float
    """Seconds since the epoch."""
    rank: int
    pid: int


_DEATH = msgspec.json.Decoder(Death)


def noted(shared: Path) -> list[Death]:
    """The last recorded death of each rank on this node; damaged lines are skipped."""
    newest: dict[int, Death] = {}
    with suppress(OSError):
        for line in (shared / FILE).read_bytes().splitlines():
            with suppress(msgspec.DecodeError):
                death = _DEATH.decode(line)
                newest[death.rank] = death
    return list(newest.values())


def forget(shared: Path) -> None:
    """Delete the recorded deaths, at the start of a job."""
    with suppress(OSError):
        (shared / FILE).unlink(missing_ok=True)
