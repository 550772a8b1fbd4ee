# SPDX-License-Identifier: Apache-2.0
"""Finds the window of a restart: the newest that all ranks can still obtain."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from moevement_ext.config import is_guest, node_name
from moevement_ext.errors import some
from moevement_ext.logger import logger_of
from moevement_ext.membership.mailbox import own_launch, own_process
from moevement_ext.membership.report import NOWHERE, Report
from moevement_ext.memory.disk import DiskWindows, stored_in
from moevement_ext.memory.ledger import Ledger
from moevement_ext.memory.node_store import Death, NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.name import (
    TRIES,
    HeldWindow,
    RankIdentity,
    StoredWindow,
    Window,
    patiently,
)
from moevement_ext.memory.window.reader import WindowReader
from moevement_ext.memory.window.refusal import (
    OtherSettings,
    RefusedWindow,
    UnreadableWindow,
    not_read,
)
from moevement_ext.memory.window.settings import digest_of, encode
from moevement_ext.memory.window.twin import TwinWindow, openers
from moevement_ext.recover.absence import DISK, MEMORY, Traces, of_other_names
from moevement_ext.replicate.secret import marks_here

logger = logger_of(__name__)


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """Windows that a rank finds at the start of a job."""

    memory: list[HeldWindow]
    """Windows in its node's memory, of all owners."""
    disk: list[HeldWindow]
    """The rank's own windows on disk."""
    traces: Traces
    refused: list[str] = []
    """Reasons to refuse windows of other settings, by name, with both values."""
    doubtful: list[str] = []
    """Other differences between the capturing jobs and this one, which may change bits."""
    settings: str = ''
    deaths: list[Death] = []
    history: str = ''
    """A draw; rank 0's counts."""


def candidates(held: Collection[HeldWindow], world_size: int) -> list[Window]:
    """Windows with every rank's part on some node, the newest dense state first.

    Of two with the same dense iteration the later history comes first.
    """
    owners: dict[Window, set[int]] = {}
    for part in held:
        owners.setdefault(part.window, set()).add(part.owner)
    complete = [found for found, ranks in owners.items() if ranks == set(range(world_size))]
    return sorted(complete, key=lambda found: (found.dense_at, found), reverse=True)


def holders(
    candidate: Window, owner: int, inventories: Sequence[Collection[HeldWindow]]
) -> list[int]:
    """Ranks whose node holds `owner`'s part, the owner first; `inventories` are by rank."""
    wanted = HeldWindow(candidate, owner)
    found = [rank for rank, inventory in enumerate(inventories) if wanted in inventory]
    return sorted(found, key=lambda rank: (rank != owner, rank))


class _Found:
    """Windows of this run and layout, with log messages about the examined ones.

    The log names refused windows once per reason. Loading a window verifies its payloads.
    """

    def __init__(self, identity: RankIdentity) -> None:
        self._identity = identity
        self.windows: set[HeldWindow] = set()
        self.doubtful: set[str] = set()
        self.other_settings: set[str] = set()
        self.unread: dict[str, int] = {}
        self._refused: dict[str, list[Path]] = {}

    def in_memory(self, store: NodeStore) -> Self:
        """Examine the committed windows of all ranks on this node."""
        for stored, opened in self._listed(lambda: openers(store)):
            self._examine(stored, opened)
        return self._log_refused()

    def on_disk(self, directory: Path) -> Self:
        """Examine this rank's windows on disk."""
        for stored in self._listed(lambda: stored_in(directory, self._identity.rank)):
            with ExitStack() as opened:
                self._examine(stored, lambda path: opened.enter_context(WindowReader(path)))
        return self._log_refused()

    def _listed[Found](self, found: Callable[[], Iterable[Found]]) -> Iterator[Found]:
        try:
            yield from found()
        except UnreadableWindow as refusal:
            self.unread |= not_read(refusal)

    def _examine(
        self, stored: StoredWindow, opened: Callable[[Path], WindowFile | WindowReader | TwinWindow]
    ) -> None:
        own = Expected.of(self._identity, stored.name)._replace(owner=stored.owner)
        try:
            tries = 1 if self.unread else TRIES  # one file has waited for all
            headers = patiently(lambda: opened(stored.path).verify_identity(own), tries)
        except RefusedWindow as refusal:
            self._refused.setdefault(refusal.reason, []).append(stored.path)
            if isinstance(refusal, OtherSettings):
                self.other_settings.add(refusal.reason)
            if stored.name.start > max(self.unread.values(), default=-1):
                self.unread |= not_read(refusal, stored.name.start)
            return
        self.windows.add(HeldWindow(Window(stored.name, headers[0].window), stored.owner))
        self.doubtful.update(own.differs(headers[0]).doubtful)

    def _log_refused(self) -> Self:
        for reason, paths in self._refused.items():
            logger.warning('refused: %s: %s', some(paths, 1), reason)
        self._refused.clear()
        return self


def held_windows(
    store: NodeStore, identity: RankIdentity, only_on: Path | None = None
) -> list[HeldWindow]:
    """Return committed windows of this run and layout for a recovery in living processes.

    Windows of all ranks in `store` count, or, with `only_on`, the rank's windows in that
    directory on disk.
    """
    found = _Found(identity)
    if only_on is not None:
        return sorted(found.on_disk(only_on).windows)
    return sorted(found.in_memory(store).windows)


def take_stock(
    store: NodeStore,
    disk: DiskWindows | None,
    identity: RankIdentity,
    disk_only: bool = False,
    layouts: Collection[str] = (),
) -> Inventory:
    """Collect this rank's inventory at the start of a job.

    `disk_only` omits windows in host memory, which are not used as a source. `layouts` are
    directories of other layouts, in which to look for an earlier name of this machine.
    """
    memory, on_disk = _Found(identity), _Found(identity)
    if not disk_only:
        memory.in_memory(store)
    if disk is not None:
        on_disk.on_disk(disk.path)
    unread = memory.unread | on_disk.unread
    try:
        traces = _traces(store, disk, identity, disk_only, layouts, unread)
    except UnreadableWindow as refusal:
        traces = Traces(node_name(), -1, [], unread=unread | not_read(refusal))
    return Inventory(
        memory=sorted(memory.windows),
        disk=sorted(on_disk.windows, reverse=True),
        traces=traces,
        refused=sorted(memory.other_settings | on_disk.other_settings),
        doubtful=sorted(memory.doubtful | on_disk.doubtful),
        settings=digest_of(identity.settings),
    )


def _traces(
    store: NodeStore,
    disk: DiskWindows | None,
    identity: RankIdentity,
    disk_only: bool,
    layouts: Collection[str],
    unread: dict[str, int],
) -> Traces:
    complete = Ledger.read_complete(store.ledger_path(identity.rank), identity)
    newest = -1 if complete is None else complete
    in_memory = complete is not None or any(held.owner == identity.rank for held in store.scan())
    on_disk = disk is not None and (bool(disk.stored()) or disk.noted_complete())
    if disk is not None:
        newest = max(newest, disk.newest_complete())
    past = [MEMORY] * (in_memory and not disk_only) + [DISK] * on_disk
    here = (NodeStore(store.root, run, store.path.name) for run in {store.run_id, *layouts})
    found = in_memory or on_disk or any(node.scan() for node in here)
    renamed = {} if found else of_other_names(store, identity, layouts)
    return Traces(node_name(), newest, past, renamed, unread)


def launch_of(identity: RankIdentity) -> str:
    """Digest of a rank's settings, equal on ranks with equal settings."""
    parts = identity.run, identity.topology, encode(identity.settings)
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(parts))


def replacement_report(
    store: NodeStore, identity: RankIdentity, only_on: Path | None = None
) -> Report:
    """Report of a new process: windows in its node's memory, or on disk (see `held_windows`)."""
    newest = Ledger.read_newest(store.ledger_path(identity.rank), identity)
    return Report(
        survivor=False,
        node=node_name(),
        guest=is_guest(),
        process=own_process(),
        windows=held_windows(store, identity, only_on),
        launched=launch_of(identity),
        committed=newest.iteration if newest is not None else NOWHERE,
        launch=own_launch(),
        marks=marks_here(),
    )
