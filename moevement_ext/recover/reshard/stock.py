# SPDX-License-Identifier: Apache-2.0
"""The parts of other layouts' windows that one process can read, in host memory and on disk."""

from pathlib import Path

import msgspec

from moevement_ext.config import SparseCheckpointConfig, node_name
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.shelf import Part, Shelf
from moevement_ext.memory.window import settings
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.refusal import UnreadableWindow, not_read
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.plan.strategy.choice import disk_only


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
        parts = shelf.look(run)
        ours = [one for one in parts if settings.of_same_training(one[1].placed, placed)]
        skipped = shelf.unread.get(run, {})
        unread |= skipped
        refused.update(f'{run}: {reason}' for reason in skipped)
        if len(ours) == len(parts) and not skipped:
            runs.append(run)
        foreign = (
            header for _, header in parts if not settings.of_same_training(header.placed, placed)
        )
        refused.update(f'{run}: {_in_what(header, identity)}' for header in foreign)
        seen += [
            _seen(part, header) for part, header in ours if part.on_disk or not disk_only(config)
        ]
    return Stock(seen, runs, sorted(refused), unread)


def _in_what(header: SlotHeader, identity: RankIdentity) -> str:
    """Settings in which the job that captured a slot differs, so that it is another training."""
    if header.placed is None:
        return 'it names no layout, so only a job in the same layout can read it'
    was = settings.decode(header.settings) if header.settings else settings.RunSettings()
    was, now = (msgspec.structs.replace(one, layout={}) for one in (was, identity.settings))
    return settings.told(settings.differences(was, now).decisive) or 'it is of another training'


def _seen(part: Part, header: SlotHeader) -> _Seen:
    assert header.placed is not None
    operators = {record.operator for record in header.records}
    return _Seen(part, header.placed, sorted(operators))
