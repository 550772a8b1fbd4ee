# SPDX-License-Identifier: Apache-2.0
"""Decides from readings whether devices are sound: a function of what was read, no more."""

import enum
from typing import NamedTuple

import msgspec

from moevement_ext.devices.xids import RECOVERY_ACTION_CHANGED, Harm, meaning_of

SLOW_S = 60.0
"""Seconds for which a device must be slowed down by its hardware to be worn: peaks are usual."""


class Action(enum.StrEnum):
    """What the driver wants to be done about a device (its recovery action)."""

    NONE = 'none'
    GPU_RESET = 'a reset of the GPU'
    NODE_REBOOT = 'a reboot of the node'
    DRAIN_P2P = 'an end of peer-to-peer traffic'
    DRAIN_AND_RESET = 'a reset of the GPU once its work is done'
    OTHER = 'an action unknown here'


_AT_ONCE = (Action.GPU_RESET, Action.NODE_REBOOT)


class Reading(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of one device at one moment; None: it does not tell."""

    device: str
    """UUID."""
    time_s: float
    """Seconds of any clock that does not jump."""
    lost: bool = False
    """The driver does not reach it."""
    xids: tuple[int, ...] = ()
    """Errors that the driver has just reported; nothing else was read then."""
    action: Action | None = None
    uncorrectable: int | None = None
    """Uncorrectable memory errors since the driver was loaded."""
    reset_pending: bool | None = None
    """Faulty rows of its memory wait for a reset to be replaced."""
    no_spare_row: bool | None = None
    """A faulty row could not be replaced."""
    slowed_by: tuple[str, ...] = ()
    """Why its hardware has lowered the clocks."""
    link_recoveries: int | None = None
    """How often an NVLink had to be trained again, all links together."""
    clock_mhz: int | None = None
    """Clock of the multiprocessors, now."""


class Finding(NamedTuple):
    """Something is wrong with a device."""

    device: str
    harm: Harm
    what: str

    def __str__(self) -> str:
        return f'{self.device}: {self.what}'


class Judge:
    """Judges all devices that readings are given of. One thread at a time uses it."""

    def __init__(self) -> None:
        self._first: dict[str, Reading] = {}
        self._slow_since: dict[str, float] = {}
        self._told: set[tuple[str, str]] = set()

    def judge(self, reading: Reading) -> list[Finding]:
        """What is newly wrong, the worst last; what lasts is told once."""
        device = reading.device
        if reading.xids:
            found = [meaning_of(xid) for xid in reading.xids if xid != RECOVERY_ACTION_CHANGED]
        else:
            first = self._first.setdefault(device, reading)
            lasting = [*_state(reading), *_grown(first, reading), *self._slow(reading)]
            found = [one for one in lasting if (device, one[1]) not in self._told]
            self._told |= {(device, what) for _, what in found}
        return [Finding(device, *one) for one in sorted(found)]

    def _slow(self, reading: Reading) -> list[tuple[Harm, str]]:
        if not reading.slowed_by:
            self._slow_since.pop(reading.device, None)
            return []
        since = self._slow_since.setdefault(reading.device, reading.time_s)
        if reading.time_s - since < SLOW_S:
            return []
        return [(Harm.WORN, f'it is slowed down by {" and ".join(reading.slowed_by)}')]


def _state(reading: Reading) -> list[tuple[Harm, str]]:
    found = []
    if reading.lost:
        found.append((Harm.DEVICE, 'the driver does not reach it'))
    if reading.action is not None and reading.action is not Action.NONE:
        harm = Harm.DEVICE if reading.action in _AT_ONCE else Harm.WORN
        found.append((harm, f'the driver asks for {reading.action}'))
    if reading.reset_pending:
        found.append((Harm.WORN, 'faulty rows of its memory wait for a reset'))
    if reading.no_spare_row:
        found.append((Harm.WORN, 'a faulty row of its memory could not be replaced'))
    return found


def _grown(first: Reading, reading: Reading) -> list[tuple[Harm, str]]:
    counts = (
        (first.uncorrectable, reading.uncorrectable, 'uncorrectable memory errors'),
        (first.link_recoveries, reading.link_recoveries, 'an NVLink had to be trained again'),
    )
    return [
        (Harm.WORN, what)
        for then, now, what in counts
        if then is not None and now is not None and now > then
    ]
