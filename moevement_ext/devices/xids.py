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


_DEVICE = {
    46: 'it stopped processing',
    48: 'uncorrectable memory error',
    62: 'its micro-controller halted',
    64: 'a faulty row of its memory could not be replaced',
    74: 'NVLink error',
    79: 'it has fallen off the bus',
    95: 'uncontained memory error',
    109: 'context switch timed out',
    110: 'security fault',
    119: 'its system processor does not answer',
    120: 'error of its system processor',
    136: 'a link could not be trained',
    140: 'unrecovered memory error',
    143: 'it could not be initialised',
    156: 'a part of it was retired',
    158: 'fatal timeout',
}
"""Their action is a reset of the GPU or a new start of the machine. 48 and 74 have a work flow of
their own, and a reset in their description. 155 is left out: a link that is put to sleep on purpose
reports it, too."""

_PROCESS = {94: 'contained memory error'}
"""The action is to start the application again; others of that kind are faults of programs."""

_WORN = {
    54: 'auxiliary power is not connected',
    63: 'a row of its memory was replaced',
    92: 'many corrected memory errors',
    **dict.fromkeys(range(144, 151), 'NVLink error'),
    155: 'an NVLink went down',
    157: 'a faulty part of it could not be retired',
    161: 'a faulty channel of it could not be retired',
}
"""What to do depends on details: if it is a reset, the recovery action of the device says so."""

RECOVERY_ACTION_CHANGED = 154
"""Comes with another one; the recovery action of the device is to be read again."""


def meaning_of(xid: int) -> tuple[Harm, str]:
    """The harm of any number, known or not, and a few words."""
    for harm, table in ((Harm.DEVICE, _DEVICE), (Harm.PROCESS, _PROCESS), (Harm.WORN, _WORN)):
        if xid in table:
            return harm, f'Xid {xid}: {table[xid]}'
    return Harm.NOTED, f'Xid {xid}'
