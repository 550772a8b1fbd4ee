# SPDX-License-Identifier: Apache-2.0
"""Faults of devices, and whether a device is usable in spite of one."""

import enum
from typing import NamedTuple


class Harm(enum.IntEnum):
    """Severity of a finding, in ascending order."""

    NOTED = 1
    """A program's fault, which CUDA reports to it, or a fault that the device has repaired."""
    WORN = 2
    """The device works, but should be reset or inspected when convenient."""
    PROCESS = 3
    """The process has lost its data on the device; another process can use the device."""
    DEVICE = 4
    """No process can use the device before a reset of the device or a reboot of its node."""


# Xids, from NVIDIA's "Xid Errors", chapter "Analyzing Xid Errors with the Xid Catalog"
# (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), columns A100 to GB200; the
# "immediate action" there determines the harm.
_CATALOG = {
    # The action is a reset of the GPU or a reboot of the machine. 48 and 74 refer to separate work
    # flows there, but their descriptions name a reset.
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


class Finding(NamedTuple):
    """A fault of a device."""

    device: str
    """UUID."""
    harm: Harm
    what: str

    def __str__(self) -> str:
        return f'{self.device}: {self.what}'


def of_xid(device: str, xid: int) -> Finding:
    """The fault that an Xid reports; unknown Xids are `NOTED`."""
    harm, what = _CATALOG.get(xid, (Harm.NOTED, ''))
    return Finding(device, harm, f'Xid {xid}: {what}' if what else f'Xid {xid}')
