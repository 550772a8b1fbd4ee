# SPDX-License-Identifier: Apache-2.0
"""What a rank tells the others when they meet after a failure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.window.name import HeldWindow, Window

NOWHERE = -1
"""In place of an iteration: none."""


class Report(msgspec.Struct, frozen=True, gc=False):
    """What a rank tells the others when they meet."""

    survivor: bool
    """False: a new process, whose memory is empty."""
    node: str
    pid: int
    windows: list[HeldWindow]
    """Committed windows on its node, of whichever rank."""
    origin: int = NOWHERE
    """Epoch in which all ranks of this life of the job started together."""
    committed: int = NOWHERE
    """Newest iteration this rank knows to be committed."""
    clean_at: int = NOWHERE
    """Iteration whose whole state it has in memory; `NOWHERE`: none, or torn in an update."""
    first_logged: int = NOWHERE
    """Oldest iteration of which its log has everything; `NOWHERE`: it logs nothing."""
    refused: list[Window] = []
    """Windows that turned out to be damaged beyond repair."""
    address: tuple[str, int] | None = None
    """Where its replica server listens; None until it has one."""
    ledger: list[LedgerEntry] = []
    """Newest committed iterations, oldest first."""
    details: bytes = b''
    """Further state that a replacement takes over, opaque here."""
    midway: bool = False
    """A new process that is setting up to join a running job, and can do nothing else any more."""


def encode(report: Report) -> bytes:
    """The bytes that go to the others."""
    return msgspec.msgpack.encode(report)


def decode_all(items: Sequence[bytes]) -> list[Report]:
    """What all ranks report; values that many report alike are decoded once, and one object.

    The ranks of a node report the same windows: in a large job a million of them, in all.
    """
    kinds = {field.name: field.type for field in msgspec.structs.fields(Report)}
    known: dict[tuple[str, bytes], Any] = {}

    def value(name: str, encoded: bytes) -> Any:
        if (name, encoded) not in known:
            known[name, encoded] = msgspec.msgpack.decode(encoded, type=kinds[name])
        return known[name, encoded]

    return [
        Report(**{name: value(name, bytes(raw)) for name, raw in fields.items()})
        for fields in (msgspec.msgpack.decode(item, type=dict[str, msgspec.Raw]) for item in items)
    ]
