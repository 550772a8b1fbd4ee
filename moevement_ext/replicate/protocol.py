# SPDX-License-Identifier: Apache-2.0
"""Messages between the holders of replicas.

Every exchange is a request and its reply, both a 4-byte length and a tagged msgpack struct. Bulk
bytes follow a message raw, and the receiver reads them straight into the mapped file. The transport
is plain TCP, because it must outlive torch's process groups, which a recovery replaces.

A connection begins with a greeting (`greeting`); then, from the client's side:

    PutSlot -> Ack (already there) | Refused | Proceed, then frame and payload (or its gaps
        between kept ranges) -> Ack | Refused
    CommitWindow -> Ack | Refused, or of a stub NotYet | Differs
    DiscardAfter -> Ack | Refused
    FetchWindow -> Refused | WindowHead, then per slot SlotHead, frame, payload -> Ack | Refused
    FetchHeaders -> Refused | WindowHead, then per slot SlotHead and frame -> Ack
    FetchLog -> Refused | NotYet | LogHead, then the bytes
    FetchLedger -> Refused | LedgerEntries
    FetchPart -> Refused | WindowHead, then per slot SlotHead and frame -> Ack
    FetchRanges -> Refused | RangesHead, then the bytes
"""

from typing import Annotated

import msgspec

from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.shelf import Part
from moevement_ext.memory.upstream_log.record import LoggedTensor, LogKey
from moevement_ext.memory.window.name import Agreed, Count, WindowName
from moevement_ext.memory.window.slot import Kept

PROTOCOL_VERSION = 11
MAX_MESSAGE_BYTES = 4 * 2**20
MAX_FRAME_BYTES = 64 * 2**20
MIN_BYTES_PER_SECOND = 10 * 2**20
"""Slowest accepted transfer: deadlines grow with the bytes to move at this rate."""

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
    """The ranks' agreement about their windows, as known to the owner."""
    window_bytes: Count = 0
    """Size of the owner's file; may exceed the holder's files after a change of flags."""
    kept: Kept | None = None
    """Ranges that the holder can copy from an earlier window of the owner, if it has that."""


class CommitWindow(msgspec.Struct, frozen=True, tag=True):
    """Request to commit a window after all its slots were sent."""

    owner: Count
    window: WindowName


class DiscardAfter(msgspec.Struct, frozen=True, tag=True):
    """Request to drop windows after `start` (-1: all), which belong to an abandoned history."""

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


class FetchLedger(msgspec.Struct, frozen=True, tag=True):
    """Request for the ledger entries of iterations after `after`, up to and including `to`."""

    after: Count
    to: Count


class FetchPart(msgspec.Struct, frozen=True, tag=True):
    """Request for all headers of a part of a window in another layout."""

    part: Part


class FetchRanges(msgspec.Struct, frozen=True, tag=True):
    """Request for bytes of records of such a part."""

    part: Part
    slot: Count
    ranges: list[tuple[Count, Count, Count]]
    """Index of the record in the slot's header, first byte within it, and one past the last."""


class RangesHead(msgspec.Struct, frozen=True, tag=True):
    """Head of the ranges that follow, one after the other, in the order of the request."""

    nbytes: Count
    checksum: Count
    """xxh3_64 of all the bytes; their records were verified."""


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Answer: done."""


class Proceed(msgspec.Struct, frozen=True, tag=True):
    """Answer: the place is reserved; send frame and payload now."""

    kept: bool = False
    """Omit the kept ranges of the payload."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Answer: not done, and why."""

    reason: str
    unread: bool = False
    """A file or directory there cannot be read now: ask again."""


class WindowHead(msgspec.Struct, frozen=True, tag=True):
    """Head of a following window or list of headers: number of slots and of bytes."""

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


class LedgerEntries(msgspec.Struct, frozen=True, tag=True):
    """Those of the requested entries that the peer has, without fields of its own."""

    entries: list[LedgerEntry]


class NotYet(msgspec.Struct, frozen=True, tag=True):
    """Answer: the record, or a stub's base, is not there yet; ask again."""


class Differs(msgspec.Struct, frozen=True, tag=True):
    """Answer: the twin's bytes differ, so its stub is no copy; names the difference."""

    reason: str


Request = (
    PutSlot
    | CommitWindow
    | DiscardAfter
    | FetchWindow
    | FetchHeaders
    | FetchLog
    | FetchLedger
    | FetchPart
    | FetchRanges
)
Reply = (
    Ack
    | Proceed
    | Refused
    | WindowHead
    | SlotHead
    | LogHead
    | LedgerEntries
    | RangesHead
    | NotYet
    | Differs
)
