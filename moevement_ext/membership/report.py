# SPDX-License-Identifier: Apache-2.0
"""What a rank tells the others when they meet after a failure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.window.name import HeldWindow, Window

NOWHERE = -1
"""In place of an iteration: none."""


class UnderWay(msgspec.Struct, frozen=True):
    """A replay that a rank is in the middle of, and that need not begin again."""

    window: Window
    """From which."""
    target: int
    """The iteration at which it ends."""
    round: int = NOWHERE
    """In which the ranks that replay together were connected."""


class Report(msgspec.Struct, frozen=True, gc=False):
    """What a rank tells the others when they meet."""

    survivor: bool
    """False: a new process, whose memory is empty."""
    node: str
    pid: int
    windows: list[HeldWindow]
    """Committed windows on its node, of whichever rank."""
    launched: str = ''
    """Digest of what it was launched with; empty: it does not say."""
    origin: int = NOWHERE
    """Round in which all ranks of this attempt of the job started together."""
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
    unjudged: bool = False
    """All stages recover together, and that may still be refused: its state is not to be kept."""
    fruitless: int = 0
    """Recoveries in a row that brought nothing, this one included."""
    own_error: bool = False
    """An error of its own has ended the round that it comes from."""
    midway: bool = False
    """A new process that is setting up to join a running job, and can do nothing else any more."""
    launch: str = ''
    """That the process is of; empty: it has no name."""
    marks: list[bytes] = []
    """Those of the secret of the job; of a new process, of secrets that it may be known by."""
    under_way: UnderWay | None = None
    """Its training thread replays meanwhile, and has left all else to another thread."""


def encode(report: Report) -> bytes:
    return msgspec.msgpack.encode(report)


# Large, and the same of many ranks: in a large job a million windows, in all.
_REPEATED = ('windows', 'ledger')
_FIELDS = {field.name: field.type for field in msgspec.structs.fields(Report)}
_AsItCame = msgspec.defstruct(
    '_AsItCame',
    [(name, msgspec.Raw if name in _REPEATED else kind) for name, kind in _FIELDS.items()],
    gc=False,
)
_PLACES = {list(_FIELDS).index(name): msgspec.msgpack.Decoder(_FIELDS[name]) for name in _REPEATED}


def decode_all(items: Sequence[bytes]) -> list[Report]:
    """What all ranks report; what many of them repeat is decoded once, and one object."""
    known: dict[tuple[int, bytes], Any] = {}
    reports = []
    for found in map(msgspec.msgpack.Decoder(_AsItCame).decode, items):
        values = list(msgspec.structs.astuple(found))
        for place, decoder in _PLACES.items():
            key = place, bytes(values[place])
            if key not in known:
                known[key] = decoder.decode(key[1])
            values[place] = known[key]
        reports.append(Report(*values))
    return reports
