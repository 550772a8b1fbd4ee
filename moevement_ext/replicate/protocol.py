# SPDX-License-Identifier: Apache-2.0
"""Messages between the holders of replicas.

Every exchange is a request and its reply, both a 4-byte length and a tagged msgpack struct. Bulk
bytes follow a message raw and are received straight into the mapped file. Plain TCP, because it
must outlive the torch process groups that are torn down and rebuilt in a recovery.

A connection begins with a greeting (`greeting`); then, from the client's side:

    PutSlot -> Ack (already there) | Refused | Proceed, then payload and frame -> Ack | Refused
    CommitWindow | DiscardAfter -> Ack | Refused
    FetchWindow -> Refused | WindowHead, then per slot SlotHead, payload, frame -> Ack | Refused
    FetchHeaders -> Refused | WindowHead, then per slot SlotHead and frame -> Ack
    FetchLog -> Refused | NotYet | LogHead, then the bytes
"""

from typing import Annotated

import msgspec

from moevement_ext.memory.upstream_log.record import LoggedTensor, LogKey
from moevement_ext.memory.window.name import Count, WindowName

PROTOCOL_VERSION = 5
MAX_MESSAGE_BYTES = 4 * 2**20
MAX_FRAME_BYTES = 64 * 2**20
MIN_BYTES_PER_SECOND = 10 * 2**20
"""Slowest transfer that is waited for: deadlines grow with the bytes to move at this rate."""

FrameBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_FRAME_BYTES)]


class PutSlot(msgspec.Struct, frozen=True, tag=True):
    """Announces one sealed slot of the sender's window."""

    owner: Count
    window: WindowName
    slot: Count
    payload_bytes: Count
    frame_bytes: FrameBytes
    frame_checksum: Count
    """Identifies the content of the slot (`slot.frame_checksum`)."""
    persisted: WindowName | None
    """The newest window the owner knows to be persisted everywhere: older replicas may go."""


class CommitWindow(msgspec.Struct, frozen=True, tag=True):
    """All slots were sent: verify the whole window and make it permanent."""

    owner: Count
    window: WindowName


class DiscardAfter(msgspec.Struct, frozen=True, tag=True):
    """Windows after `start` (-1: all) belong to an abandoned past."""

    owner: Count
    start: int


class FetchWindow(msgspec.Struct, frozen=True, tag=True):
    """Send a whole committed window."""

    owner: Count
    window: WindowName


class FetchHeaders(msgspec.Struct, frozen=True, tag=True):
    """Send the headers of all sealed slots of windows after `start`, complete or not."""

    owner: Count
    start: int


class FetchLog(msgspec.Struct, frozen=True, tag=True):
    """Send one record of the upstream log of the peer."""

    key: LogKey


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Done."""


class Proceed(msgspec.Struct, frozen=True, tag=True):
    """The place is reserved: send payload and frame now."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Not done, and why."""

    reason: str


class WindowHead(msgspec.Struct, frozen=True, tag=True):
    """The window that follows: number of slots and of bytes."""

    slots: Count
    nbytes: Count


class SlotHead(msgspec.Struct, frozen=True, tag=True):
    """The slot that follows."""

    slot: Count
    payload_bytes: Count
    frame_bytes: FrameBytes


class LogHead(msgspec.Struct, frozen=True, tag=True):
    """The record that follows."""

    tensor: LoggedTensor


class NotYet(msgspec.Struct, frozen=True, tag=True):
    """The record is not there but may still come: ask again."""


Request = PutSlot | CommitWindow | DiscardAfter | FetchWindow | FetchHeaders | FetchLog
Reply = Ack | Proceed | Refused | WindowHead | SlotHead | LogHead | NotYet
