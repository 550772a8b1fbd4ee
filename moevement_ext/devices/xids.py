# SPDX-License-Identifier: Apache-2.0
"""What an error that NVIDIA's driver reports (an Xid) means for the job.

From NVIDIA's "Xid Errors", chapter "Analyzing Xid Errors with the Xid Catalog"
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), columns A100 to GB200, whose
"immediate action" tells them apart.
"""

import enum


class Harm(enum.IntEnum):
    """How bad a finding is, from bad to worse."""

    NOTED = 1
    """A fault of a program, or one that the device has mended: CUDA tells the program itself."""
    WORN = 2
    """The device works, but should be reset or looked at when that is convenient."""
    PROCESS = 3
    """What the process has on the device is lost; another process can use the device."""
    DEVICE = 4
    """Nobody can use the device until it is reset, or its node started again."""


RECOVERY_ACTION_CHANGED = 154
"""Comes with another one; the recovery action of the device is to be read again."""

_CATALOG = {
    # The action is a reset of the GPU or a new start of the machine. 48 and 74 have a work flow of
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
    # The action is to start the application again; others of that kind are faults of programs.
    94: (Harm.PROCESS, 'contained memory error'),
    # What to do depends on details: if it is a reset, the recovery action of the device says so.
    54: (Harm.WORN, 'auxiliary power is not connected'),
    63: (Harm.WORN, 'a row of its memory was replaced'),
    92: (Harm.WORN, 'many corrected memory errors'),
    **dict.fromkeys(range(144, 151), (Harm.WORN, 'NVLink error')),
    155: (Harm.WORN, 'an NVLink went down'),  # also one that is put to sleep on purpose
    157: (Harm.WORN, 'a faulty part of it could not be retired'),
    161: (Harm.WORN, 'a faulty channel of it could not be retired'),
}


def meaning_of(xid: int) -> tuple[Harm, str]:
    """The harm of any number, known or not, and a few words."""
    harm, what = _CATALOG.get(xid, (Harm.NOTED, ''))
    return harm, f'Xid {xid}: {what}' if what else f'Xid {xid}'
