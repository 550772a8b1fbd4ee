# SPDX-License-Identifier: Apache-2.0
"""Finds windows of other layouts of the same training: their parts here, then over all ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from moevement_ext.config import SparseCheckpointConfig, node_name
from moevement_ext.errors import UserError, some
from moevement_ext.logger import logger_of
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.shelf import Part, Shelf
from moevement_ext.memory.window import settings
from moevement_ext.memory.window.name import RankIdentity, Window
from moevement_ext.memory.window.refusal import UnreadableWindow, not_read
from moevement_ext.memory.window.settings import Layout, Seat, first_lines, of_same_training
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.plan.strategy.choice import disk_only

logger = logger_of(__name__)


class _Seen(msgspec.Struct, frozen=True):
    """A part that a rank can read, with fields of its first slot."""

    part: Part
    placed: settings.Placed
    operators: list[str]
    """Operators of which the owner has any byte."""


class Stock(msgspec.Struct, frozen=True):
    """The parts of other layouts that a rank can read."""

    seen: list[_Seen]
    runs: list[str]
    """Directories that contain only windows of this training; damaged ones do not count."""
    refused: list[str] = []
    """Reasons to refuse windows: another training, by name with both values, or another release."""
    unread: dict[str, int] = {}
    """The reasons and starts of `Shelf.unread`, of all runs."""


_STOCK = msgspec.msgpack.Decoder(Stock)


@dataclass
class Candidate:
    """A window of another layout, whose owners' parts are on some nodes or disks."""

    run: str
    window: Window
    layout: Layout
    seats: dict[int, Seat] = field(default_factory=dict)
    operators: dict[int, frozenset[str]] = field(default_factory=dict)
    holders: dict[int, list[tuple[int, Part]]] = field(default_factory=dict)
    """Ranks that can read the part, by owner."""

    @property
    def missing(self) -> list[int]:
        """Owners whose part no rank can read."""
        return [owner for owner in range(self.layout.ranks) if owner not in self.seats]


@dataclass
class Elsewhere:
    """Windows of other layouts, the newest dense state first."""

    candidates: list[Candidate]
    runs: list[str]
    """Directories on this node that are useless once all ranks have their own window."""
    torn: list[Candidate] = field(default_factory=list)
    """Windows that lack some owners' parts; empty if there are candidates."""
    unread: dict[str, int] = field(default_factory=dict)
    """Starts of windows after the dense checkpoint that are not read, by the reason."""

    @property
    def dense_at(self) -> int:
        """Iteration of the newest dense state, -1 if there is none."""
        return max((one.window.dense_at for one in self.candidates), default=-1)


NOTHING = Elsewhere([], [])


def shelf_of(config: SparseCheckpointConfig, run_id: str) -> Shelf:
    """The other layouts of the run on this node and its disk."""
    store = NodeStore(Path(config.dir), run_id, node_name())
    return Shelf(store, None if config.disk is None else Path(config.disk))


def take_stock(identity: RankIdentity, config: SparseCheckpointConfig, shelf: Shelf) -> Stock:
    """List the parts of other layouts that this process can read.

    `identity` is this rank's. Raises `StoreInUseError` if a live job has another layout of the run.
    """
    placed = identity.placed
    if placed is None:
        return Stock([], [])
    seen, runs, refused, unread = [], [], set[str](), dict[str, int]()
    try:
        found = shelf.runs()
    except UnreadableWindow as refusal:
        return Stock([], [], unread=not_read(refusal))
    for run in found:
        parts = shelf.whole_windows(run)
        ours = [one for one in parts if of_same_training(one[1].placed, placed)]
        foreign = [one for _, one in parts if not of_same_training(one.placed, placed)]
        skipped = shelf.unread.get(run, {})
        unread |= skipped
        refused.update(f'{run}: {reason}' for reason in skipped)
        if not (foreign or skipped):
            runs.append(run)
        refused.update(f'{run}: {_in_what(header, identity)}' for header in foreign)
        seen += [_seen(*one) for one in ours if one[0].on_disk or not disk_only(config)]
    return Stock(seen, runs, sorted(refused), unread)


def _in_what(header: SlotHeader, identity: RankIdentity) -> str:
    """Settings in which the job that captured a slot differs, so that it is another training."""
    if header.placed is None:
        return 'it names no layout, so only a job in the same layout can read it'
    was = settings.decode(header.settings) if header.settings else settings.RunSettings()
    was, now = (msgspec.structs.replace(one, layout={}) for one in (was, identity.settings))
    return first_lines(settings.differences(was, now).decisive) or 'it is of another training'


def _seen(part: Part, header: SlotHeader) -> _Seen:
    assert header.placed is not None
    operators = {record.operator for record in header.records}
    return _Seen(part, header.placed, sorted(operators))


def find(rank: Rank, shelf: Shelf, dense_iteration: int, last_iteration: int | None) -> Elsewhere:
    """Find windows of other layouts on all nodes and disks. Collective.

    Iterations as in `whole_job.find`. Raises `StoreInUseError` if a live job has another layout of
    the run.
    """
    stock = take_stock(rank.identity, rank.config, shelf)
    encoded = rank.exchange('other-layouts', msgspec.msgpack.encode(stock))
    stocks = [_STOCK.decode(item) for item in encoded]
    everything = [
        one
        for one in merged(stocks)
        if dense_iteration <= one.window.dense_at < (last_iteration or one.window.dense_at + 1)
    ]
    whole = [one for one in everything if not one.missing]
    _log_refused_layouts(rank, sorted({reason for stock in stocks for reason in stock.refused}))
    unread = {
        reason: start
        for stock in stocks
        for reason, start in stock.unread.items()
        if start >= dense_iteration
    }
    newer = everything[: everything.index(whole[0])] if whole and rank.number == 0 else []
    for one in newer:  # of nodes that may be back later
        missing = f'no node here has the parts of ranks {some(one.missing)}'
        logger.warning('window %d of %s is not used: %s', one.window.start, one.layout, missing)
    return Elsewhere(whole, stock.runs, [] if whole else everything, unread)


def require_parts(elsewhere: Elsewhere, own: int) -> None:
    """Refuse to start over while parts of newer windows are missing, with `UserError`.

    The same if newer windows are of another release, or cannot be read now.

    `own` is the newest dense iteration in windows of this layout, -1 if there is none. Incomplete
    windows that are dense there, or at most one window later, are remains of a layout that this one
    has replaced: all processes died while the nodes deleted its windows.
    """
    for reason, start in elsewhere.unread.items():
        if start > max(own, elsewhere.dense_at):
            raise UserError(
                f'--sparse-ckpt-elastic: another layout {reason}; --sparse-ckpt-forget goes on '
                'without it.'
            )
    # A replaced layout may also have begun the next window.
    begun = int(own >= 0)
    newer = [one for one in elsewhere.torn if one.window.dense_at > own + begun * one.window.length]
    if newer:
        raise UserError(_missing(newer))


def require_exact(candidate: Candidate, ranks: int) -> None:
    """Refuse, with `UserError`, a window that this start would continue only up to rounding.

    `ranks` is the number of this start.
    """
    length, layout = candidate.window.length, candidate.layout
    if length > 1:
        raise UserError(
            f'--sparse-ckpt-elastic-exact: the newest window has {length} slots, which only '
            f'{layout} can go on from exactly: start that layout again, with {layout.ranks} ranks '
            f'instead of {ranks}, or leave the flag out, to go on equal up to rounding.'
        )


def _log_refused_layouts(rank: Rank, refused: Sequence[str]) -> None:
    """Report windows that cannot be used; raises `UserError` with `--sparse-ckpt-strict`."""
    if refused and rank.config.strict:
        raise UserError(
            '--sparse-ckpt-strict: windows of the run in another layout cannot be used: '
            f'{first_lines(refused)}. Start it with the flags and the release that it had, or give '
            'it another --sparse-ckpt-run-id.'
        )
    for reason in refused if rank.number == 0 else ():
        logger.warning('refused: windows in another layout, %s', reason)


def merged(stocks: Sequence[Stock]) -> list[Candidate]:
    """Windows in the stocks of all ranks, complete or not, the newest dense state first."""
    found: dict[tuple[str, Window], Candidate] = {}
    for number, stock in enumerate(stocks):
        for seen in stock.seen:
            part, layout = seen.part, seen.placed.layout
            key = part.run, part.window
            one = found.setdefault(key, Candidate(part.run, part.window, layout))
            one.seats[part.owner] = seen.placed.seat
            one.operators[part.owner] = frozenset(seen.operators)
            one.holders.setdefault(part.owner, []).append((number, part))
    return sorted(found.values(), key=lambda one: (one.window.dense_at, one.window), reverse=True)


def _missing(candidates: Iterable[Candidate]) -> str:
    nearest = min(candidates, key=lambda one: (len(one.missing), -one.window.dense_at))
    return (
        f'window {nearest.window.start} was captured by {nearest.layout}, and no node here has the '
        f'parts of ranks {some(nearest.missing)}, nor a disk: start again '
        'with the nodes that have them; --sparse-ckpt-forget goes on without them.'
    )
