# SPDX-License-Identifier: Apache-2.0
"""Which window do all ranks restart from? The newest that everybody can still get."""

import logging
import os
from collections.abc import Collection, Sequence

import msgspec

from moevement_ext.config import node_name
from moevement_ext.membership.report import NOWHERE, Report
from moevement_ext.memory.deaths import Death
from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.ledger import Ledger
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.expected import Expected
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import HeldWindow, RankIdentity, Window
from moevement_ext.memory.window.reader import WindowReader
from moevement_ext.memory.window.refused import RefusedWindow

logger = logging.getLogger(__name__)


class Inventory(msgspec.Struct, frozen=True):
    """What a rank finds of windows at the start of a job."""

    memory: list[HeldWindow]
    """On its node, of all owners."""
    disk: list[HeldWindow]
    """Its own, on disk."""
    deaths: list[Death] = []
    """Processes of an earlier life that ended on its node, as noted there."""


def candidates(held: Collection[HeldWindow], world_size: int) -> list[Window]:
    """Windows of which every rank's part exists somewhere, the newest dense state first."""
    owners: dict[Window, set[int]] = {}
    for part in held:
        owners.setdefault(part.window, set()).add(part.owner)
    complete = [found for found, ranks in owners.items() if ranks == set(range(world_size))]
    return sorted(complete, key=lambda found: (found.dense_at, found), reverse=True)


def holders(
    candidate: Window, owner: int, inventories: Sequence[Collection[HeldWindow]]
) -> list[int]:
    """Ranks whose node holds `owner`'s part, the owner itself first.

    Args:
        candidate: the window.
        owner: rank whose part is asked for.
        inventories: what each rank's node holds, by rank.
    """
    wanted = HeldWindow(candidate, owner)
    found = [rank for rank, inventory in enumerate(inventories) if wanted in inventory]
    return sorted(found, key=lambda rank: (rank != owner, rank))


def held_windows(store: NodeStore, run: str, topology: str) -> list[HeldWindow]:
    """Committed windows on this node that belong to this run and layout, without duplicates.

    What is refused is named in the log. Payloads are verified later, when one is loaded.
    """
    found = set()
    for stored in store.scan():
        expected = Expected(run, topology, stored.owner, stored.name)
        try:
            headers = WindowFile.open(stored.path).verify_identity(expected)
        except RefusedWindow as refusal:
            logger.warning('refused: %s', refusal)
            continue
        found.add(HeldWindow(Window(stored.name, headers[0].window), stored.owner))
    return sorted(found)


def windows_on_disk(disk: DiskWindows, identity: RankIdentity) -> list[HeldWindow]:
    """A rank's windows on disk that belong to this run and layout.

    As for `held_windows`; a file system that does not answer as it should has none.
    """
    found = []
    for stored in disk.stored():
        try:
            with WindowReader(stored.path) as reader:
                headers = reader.verify_identity(Expected.of(identity, stored.name))
        except RefusedWindow as refusal:
            logger.warning('refused: %s', refusal)
            continue
        found.append(HeldWindow(Window(stored.name, headers[0].window), stored.owner))
    return found


def replacement_report(store: NodeStore, identity: RankIdentity) -> Report:
    """What a new process has: what its node's memory kept."""
    newest = Ledger.read_newest(store.ledger_path(identity.rank))
    return Report(
        survivor=False,
        node=node_name(),
        pid=os.getpid(),
        windows=held_windows(store, identity.run, identity.topology),
        committed=newest.iteration if newest is not None else NOWHERE,
    )
