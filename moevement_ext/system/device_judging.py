# SPDX-License-Identifier: Apache-2.0
"""Decides from readings whether devices are usable; does not access the devices."""

import enum
from typing import NamedTuple

from moevement_ext.system.xids import RECOVERY_ACTION_CHANGED, Harm, meaning_of


class Action(enum.StrEnum):
    """Recovery action that the driver requests for a device."""

    NONE = 'none'
    GPU_RESET = 'a reset of the GPU'
    NODE_REBOOT = 'a reboot of the node'
    DRAIN_P2P = 'an end of peer-to-peer traffic'
    DRAIN_AND_RESET = 'a reset of the GPU once its work is done'
    OTHER = 'an action unknown here'


_AT_ONCE = (Action.GPU_RESET, Action.NODE_REBOOT)


class Reading(NamedTuple):
    """State of one device at one moment; None for values that the device does not report."""

    device: str
    """UUID."""
    lost: bool = False
    """The driver does not reach the device."""
    xids: tuple[int, ...] = ()
    """Errors just reported by the driver; the other values are unset then."""
    action: Action | None = None
    clock_mhz: int | None = None
    """Current clock of the multiprocessors."""


class Finding(NamedTuple):
    """A fault of a device."""

    device: str
    harm: Harm
    what: str

    def __str__(self) -> str:
        return f'{self.device}: {self.what}'


class Judge:
    """Finds faults in readings of devices. Not thread-safe."""

    def __init__(self) -> None:
        self._told: set[Finding] = set()

    def judge(self, reading: Reading) -> list[Finding]:
        """Return new faults, the worst last; a persistent fault is returned once."""
        if reading.xids:
            errors = (meaning_of(xid) for xid in reading.xids if xid != RECOVERY_ACTION_CHANGED)
            return sorted(Finding(reading.device, *error) for error in errors)
        lasting = {Finding(reading.device, *one) for one in _state(reading)}
        new = sorted(lasting - self._told)
        self._told |= lasting
        return new


def _state(reading: Reading) -> list[tuple[Harm, str]]:
    found = []
    if reading.lost:
        found.append((Harm.DEVICE, 'the driver does not reach it'))
    if reading.action not in (None, Action.NONE):
        harm = Harm.DEVICE if reading.action in _AT_ONCE else Harm.WORN
        found.append((harm, f'the driver asks for {reading.action}'))
    return found
