# SPDX-License-Identifier: Apache-2.0
"""Messages between the holders of replicas.

Every exchange is a request and its reply, both a 4-byte length and a tagged msgpack struct. Bulk
bytes follow a message raw and are received straight into the mapped file. Plain TCP, because it
must outlive the torch process groups that are torn down and rebuilt in a recovery.

A connection begins with a greeting (`greeting`); then, from the client's side:

    PutSlot -> Ack (already there) | Refused | Proceed, then payload and frame -> Ack | Refused
    CommitWindow -> Ack | Refused, or of a stub NotYet | Differs
    DiscardAfter -> Ack | Refused
    FetchWindow -> Refused | WindowHead, then per slot SlotHead, payload, frame -> Ack | Refused
    FetchHeaders -> Refused | WindowHead, then per slot SlotHead and frame -> Ack
    FetchLog -> Refused | NotYet | LogHead, then the bytes
"""

from typing import Annotated

import msgspec

from moevement_ext.memory.upstream_log.record import LoggedTensor, LogKey
from moevement_ext.memory.window.agreed import Agreed
from moevement_ext.memory.window.name import Count, WindowName

PROTOCOL_VERSION = 7
MAX_MESSAGE_BYTES = 4 * 2**20
MAX_FRAME_BYTES = 64 * 2**20
MIN_BYTES_PER_SECOND = 10 * 2**20
"""Slowest transfer that is waited for: deadlines grow with the bytes to move at this rate."""

FrameBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_FRAME_BYTES)]


class PutSlot(msgspec.Struct, frozen=True, tag=True):
    """Announcement of one sealed slot of the sender's window."""

    owner: Count
    window: WindowName
    slot: Count
    payload_bytes: Count
    frame_bytes: FrameBytes
    frame_checksum: Count
    """Identifies the content of the slot (`slot.frame_checksum`)."""
    agreed: Agreed
    """What, as far as the owner was told, all ranks agreed on about their windows."""
    window_bytes: Count = 0
    """Size of the owner's file; a window of other flags may need more than the holder's have."""


class CommitWindow(msgspec.Struct, frozen=True, tag=True):
    """Request to verify a whole window, all of whose slots were sent, and to make it permanent."""

    owner: Count
    window: WindowName


class DiscardAfter(msgspec.Struct, frozen=True, tag=True):
    """Request to drop windows after `start` (-1: all), which belong to an abandoned past."""

    owner: Count
    start: int


class FetchWindow(msgspec.Struct, frozen=True, tag=True):
    """Request for a whole committed window."""

    owner: Count
    window: WindowName


class FetchHeaders(msgspec.Struct, frozen=True, tag=True):
    """Request for the headers of all sealed slots of windows after `start`, complete or not."""

    owner: Count
    start: int


class FetchLog(msgspec.Struct, frozen=True, tag=True):
    """Request for one record of the upstream log of the peer."""

    key: LogKey


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Answer: done."""


class Proceed(msgspec.Struct, frozen=True, tag=True):
    """Answer: the place is reserved, send payload and frame now."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Answer: not done, and why."""

    reason: str


class WindowHead(msgspec.Struct, frozen=True, tag=True):
    """Head of the window, or of the headers, that follow: number of slots and of bytes."""

    slots: Count
    nbytes: Count


class SlotHead(msgspec.Struct, frozen=True, tag=True):
    """Head of the slot that follows."""

    slot: Count
    payload_bytes: Count
    frame_bytes: FrameBytes


class LogHead(msgspec.Struct, frozen=True, tag=True):
    """Head of the record that follows."""

    tensor: LoggedTensor


class NotYet(msgspec.Struct, frozen=True, tag=True):
    """Answer: the record, or a stub's base, is not there but may still come, ask again."""


class Differs(msgspec.Struct, frozen=True, tag=True):
    """Answer: the twin does not hold the same bytes, so it is none; where they differ."""

    reason: str


Request = PutSlot | CommitWindow | DiscardAfter | FetchWindow | FetchHeaders | FetchLog
Reply = Ack | Proceed | Refused | WindowHead | SlotHead | LogHead | NotYet | Differs
