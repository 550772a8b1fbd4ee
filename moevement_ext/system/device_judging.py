# SPDX-License-Identifier: Apache-2.0
"""Decides from readings whether devices are usable; does not access the devices."""

import enum
from typing import NamedTuple


class Harm(enum.IntEnum):
    """Severity of a finding, in ascending order."""

    NOTED = 1
    """A fault of a program, or one that the device has repaired; CUDA reports it to the program."""
    WORN = 2
    """The device works, but should be reset or inspected when convenient."""
    PROCESS = 3
    """The process has lost its data on the device; another process can use the device."""
    DEVICE = 4
    """No process can use the device before a reset of the device or a reboot of its node."""


RECOVERY_ACTION_CHANGED = 154
"""Accompanies another Xid; the recovery action of the device must be read again."""

# Xids, from NVIDIA's "Xid Errors", chapter "Analyzing Xid Errors with the Xid Catalog"
# (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), columns A100 to GB200; the
# "immediate action" there determines the harm.
_CATALOG = {
    # The action is a reset of the GPU or a reboot of the machine. 48 and 74 have a work flow of
    # their own, and a reset in their description.
    46: (Harm.DEVICE, 'it stopped processing'),
    48: (Harm.DEVICE, 'uncorrectable memory error'),
    62: (Harm.DEVICE, 'its micro-controller halted'),
    64: (Harm.DEVICE, 'a faulty row of its memory could not be replaced'),
    74: (Harm.DEVICE, 'NVLink error'),
    79: (Harm.DEVICE, 'it has fallen off the bus'),
    95: (Harm.DEVICE, 'uncontained memory error'),
    109: (Harm.DEVICE, 'context switch timed out'),
    110: (Harm.DEVICE, 'security fault'),
    119: (Harm.DEVICE, 'its system processor does not answer'),
    120: (Harm.DEVICE, 'error of its system processor'),
    136: (Harm.DEVICE, 'a link could not be trained'),
    140: (Harm.DEVICE, 'unrecovered memory error'),
    143: (Harm.DEVICE, 'it could not be initialised'),
    156: (Harm.DEVICE, 'a part of it was retired'),
    158: (Harm.DEVICE, 'fatal timeout'),
    # The action is a restart of the application; other Xids with this action are program faults.
    94: (Harm.PROCESS, 'contained memory error'),
    # The action depends on details; the device's recovery action shows if a reset is necessary.
    54: (Harm.WORN, 'auxiliary power is not connected'),
    63: (Harm.WORN, 'a row of its memory was replaced'),
    92: (Harm.WORN, 'many corrected memory errors'),
    **dict.fromkeys(range(144, 151), (Harm.WORN, 'NVLink error')),
    155: (Harm.WORN, 'an NVLink went down'),  # also a link put to sleep on purpose
    157: (Harm.WORN, 'a faulty part of it could not be retired'),
    161: (Harm.WORN, 'a faulty channel of it could not be retired'),
}


def meaning_of(xid: int) -> tuple[Harm, str]:
    """Harm and short description of an Xid, also of an unknown one."""
    harm, what = _CATALOG.get(xid, (Harm.NOTED, ''))
    return harm, f'Xid {xid}: {what}' if what else f'Xid {xid}'


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
