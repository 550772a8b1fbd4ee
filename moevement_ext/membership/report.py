# SPDX-License-Identifier: Apache-2.0
"""The report with which a rank joins a round."""

from collections.abc import Sequence

import msgspec

from moevement_ext.memory.window.name import HeldWindow, History, Window

NOWHERE = -1
"""Stands for "no iteration" or "no round"."""


class UnderWay(msgspec.Struct, frozen=True):
    """A replay in progress, which need not begin again."""

    window: Window
    """Window that the replay began from."""
    target: int
    """Iteration at which the replay ends."""
    round: int = NOWHERE
    """Round in which the ranks that replay together were connected."""


class Report(msgspec.Struct, frozen=True, gc=False):
    """State of a rank at a rendezvous."""

    survivor: bool
    """False: a new process, whose memory is empty."""
    node: str
    process: int
    """Number of the process, see `own_process`."""
    windows: list[HeldWindow]
    """Committed windows on its node, of all owners."""
    guest: bool = False
    """Its node works for other ranks, too: the rank's own node is lost."""
    launched: str = ''
    """Digest of its launch settings; empty: not stated."""
    origin: int = NOWHERE
    """Round in which all ranks of this attempt of the job started together."""
    committed: int = NOWHERE
    """Newest iteration that this rank knows to be committed."""
    clean_at: int = NOWHERE
    """Iteration whose complete state it has; `NOWHERE`: none, or the state is torn by an update."""
    first_logged: int = NOWHERE
    """Oldest iteration that its log has completely; `NOWHERE`: it logs nothing."""
    refused: list[Window] = []
    """Windows that turned out to be damaged beyond repair."""
    address: tuple[str, int] | None = None
    """Where its replica server listens; None until it has one."""
    coordinator: tuple[str, int] | None = None
    """Where the coordinator listens that it keeps, on rank 0."""
    details: bytes = b''
    """Further state for a new process, opaque here."""
    other_bits: str = ''
    """What its recovery computed otherwise than before; the job ends (`--sparse-ckpt-verify`)."""
    fruitless: int = 0
    """Consecutive recoveries without progress, including this one."""
    own_error: bool = False
    """Its own error has ended its previous round."""
    midway: bool = False
    """A new process whose set-up is for joining a running job; it cannot start a job."""
    launch: str = ''
    """Launch of the process; empty: the launch has no name."""
    marks: list[bytes] = []
    """Marks of the job's secret; in a new process, of all secrets that it has found."""
    history: History = History()
    """The survivor's; only windows of it are recovered from."""
    under_way: UnderWay | None = None
    """Set while its training thread replays and another thread joins the round."""


def encode(report: Report) -> bytes:
    return msgspec.msgpack.encode(report)


_FIELDS = {field.name: field.type for field in msgspec.structs.fields(Report)}
# A large job has a million windows in all reports; ranks of a node have the same ones.
_AsItCame = msgspec.defstruct(
    '_AsItCame',
    [(name, msgspec.Raw if name == 'windows' else kind) for name, kind in _FIELDS.items()],
    gc=False,
)
_PLACE = [*_FIELDS].index('windows')
_WINDOWS = msgspec.msgpack.Decoder(_FIELDS['windows'])


def decode_all(items: Sequence[bytes]) -> list[Report]:
    """Decode the reports of all ranks; equal lists of windows become one object."""
    known: dict[bytes, list[HeldWindow]] = {}
    reports = []
    for found in map(msgspec.msgpack.Decoder(_AsItCame).decode, items):
        values = list(msgspec.structs.astuple(found))
        windows = bytes(values[_PLACE])
        if windows not in known:
            known[windows] = _WINDOWS.decode(windows)
        values[_PLACE] = known[windows]
        reports.append(Report(*values))
    return reports
