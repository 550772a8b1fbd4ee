# SPDX-License-Identifier: Apache-2.0
"""Windows that a run has in other layouts, on this node and on disk.

With `--sparse-ckpt-elastic` a run has one directory per layout, `<run id>.<digest>`. So a job
overwrites no window of an earlier layout before all of its ranks have their own window.
"""

import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import xxhash

from moevement_ext.config import LAYOUT_SUFFIX
from moevement_ext.logger import logger_of
from moevement_ext.memory.holder_lock import wait_until_free
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.format import Expected, damaged
from moevement_ext.memory.window.name import (
    TRIES,
    Count,
    StoredWindow,
    Window,
    committed_in,
    names_in,
    patiently,
)
from moevement_ext.memory.window.reader import WindowReader
from moevement_ext.memory.window.refusal import RefusedWindow, UnreadableWindow, joined, not_read
from moevement_ext.memory.window.slot import Record, SlotHeader
from moevement_ext.memory.window.twin import Opener, TwinWindow, openers

logger = logger_of(__name__)

_RANK = re.compile(r'rank(\d+)')


class Part(msgspec.Struct, frozen=True, order=True, gc=False):
    """One owner's part of a window in another layout."""

    run: str
    """Directory of the layout."""
    window: Window
    owner: Count
    on_disk: bool


def directory_of(run: str, layout: str) -> str:
    """Name of the directory of a run in one layout, with a digest of the layout."""
    return f'{run}.{layout[:8]}'


def base_of(run_id: str) -> str:
    return LAYOUT_SUFFIX.sub('', run_id)


def directories_of(root: Path, run: str) -> list[str]:
    """Directories of a run, first the one without a layout digest; errors as of `names_in`."""
    of_run = re.compile(re.escape(run) + f'(?:{LAYOUT_SUFFIX.pattern})?')
    return [name for name in names_in(root) if of_run.fullmatch(name)]


def left_by_elastic(store: NodeStore) -> list[str]:
    """Messages about windows that a job without `--sparse-ckpt-elastic` cannot use."""
    found = directories_of(store.root, store.run_id)
    return [
        f'{store.root / name} is of a start with --sparse-ckpt-elastic, and this one is without'
        for name in found
        if name != store.run_id and (store.root / name / store.path.name).is_dir()
    ]


@dataclass(eq=False)
class Copy:
    """One copy of an owner's part of a window. Everything but its payload is verified.

    `data` returns the bytes of a record of a slot; with `mapped`, the same memory each time.
    """

    _path: Path
    headers: list[SlotHeader]
    _data: Callable[[int, Record], memoryview]
    mapped: bool
    _verified: set[tuple[int, int]] = field(default_factory=set)

    def read(self, slot: int, index: int) -> memoryview:
        """Verified bytes of record `index`; `RefusedWindow` if they are damaged."""
        record = self.headers[slot].records[index]
        data = self._data(slot, record)
        if (slot, index) not in self._verified:
            if xxhash.xxh3_64_intdigest(data) != record.checksum:
                raise damaged(self._path, slot, record)
            if self.mapped:
                self._verified.add((slot, index))
        return data


def read_any(copies: Iterable[Copy], slot: int, index: int) -> memoryview:
    """Verified bytes of record `index`; the error of `joined` without an undamaged copy."""
    refusals = []
    for copy in copies:
        try:
            return copy.read(slot, index)
        except RefusedWindow as refusal:
            refusals.append(refusal)
    raise joined(refusals)


class Shelf:
    """Reads windows of other layouts of the run, in memory and on `disk` (`--sparse-ckpt-disk`).

    Any thread. Only the `remove*` methods write. `store` is the one of this layout.

    Attributes:
        unread: starts of windows that `whole_windows` skipped, though they may be whole, by run and
            reason (see `refusal.not_read`).
    """

    def __init__(self, store: NodeStore, disk: Path | None) -> None:
        self._store = store
        self._node = store.path.name
        self._disk = disk
        self.unread: dict[str, dict[str, int]] = {}
        self._copies: dict[Part, list[Copy]] = {}
        self._lock = threading.Lock()

    def runs(self) -> list[str]:
        own = self._store.run_id
        roots = filter(None, (self._store.root, self._disk))
        found = {name for root in roots for name in directories_of(root, base_of(own))}
        return sorted(found - {own})

    def whole_windows(self, run: str) -> list[tuple[Part, SlotHeader]]:
        """The whole windows of a layout with the header of slot 0; reads no payloads.

        Raises `StoreInUseError` if a live job uses that layout.
        """
        store = NodeStore(self._store.root, run, self._node)
        places = [store.path] if self._disk is None else [store.path, self._disk / run]
        found, skipped = dict[Part, SlotHeader](), self.unread.setdefault(run, {})
        skipped.clear()
        try:
            for directory in (place / name for place in places for name in names_in(place)):
                wait_until_free(directory / 'lock', 'a job of another layout')
            for stored, from_disk, opened in self._stored(store, run):
                try:
                    tries = 1 if skipped else TRIES  # one file has waited for all
                    headers = patiently(partial(opened, stored.path), tries).headers
                except RefusedWindow as refusal:
                    logger.warning('refused: %s', refusal)
                    skipped |= not_read(refusal, stored.name.start)
                    continue
                part = Part(run, Window(stored.name, headers[0].window), stored.owner, from_disk)
                found.setdefault(part, headers[0])
        except UnreadableWindow as refusal:
            skipped |= not_read(refusal)
        return [*found.items()]

    def headers(self, part: Part) -> list[SlotHeader]:
        """Headers of a part, slot 0 first; `RefusedWindow` if it is missing or damaged."""
        return self._opened(part)[0].headers

    def read(self, part: Part, slot: int, index: int) -> memoryview:
        """Verified bytes of record `index`; `RefusedWindow` without an undamaged copy here."""
        return read_any(self._opened(part), slot, index)

    def close(self) -> None:
        """Unmap all windows: deleted files take memory until then. A later read opens them anew."""
        with self._lock:
            self._copies.clear()

    def remove(self, runs: list[str]) -> None:
        """Delete files of these layouts without a live process, in the memory of this node."""
        for run in runs:
            NodeStore(self._store.root, run, self._node).remove_unused()

    def remove_on_disk(self, runs: list[str]) -> None:
        """Delete the windows of these layouts on the disk that this node sees."""
        for run in runs:
            if self._disk is not None:
                shutil.rmtree(self._disk / run, ignore_errors=True)

    def _opened(self, part: Part) -> list[Copy]:
        with self._lock:
            if part not in self._copies:
                self._copies[part] = self._open(part)
            return self._copies[part]

    def _open(self, part: Part) -> list[Copy]:
        if part.run not in self.runs():
            raise RefusedWindow(f'{part.run} is no other layout of the run {self._store.run_id}')
        copies, refusals = [], []
        for stored, on_disk, opened in self._stored(
            NodeStore(self._store.root, part.run, self._node), part.run
        ):
            if (stored.name, stored.owner, on_disk) == (part.window.name, part.owner, part.on_disk):
                try:
                    copies.append(opened(stored.path))
                except RefusedWindow as refusal:
                    refusals.append(refusal)
        if not copies:
            missing = f'window {part.window.start} of rank {part.owner} is not here'
            raise joined(refusals, missing)
        return copies

    def _stored(
        self, store: NodeStore, run: str
    ) -> Iterator[tuple[StoredWindow, bool, Callable[[Path], Copy]]]:
        for stored, opened in openers(store):
            yield stored, False, partial(copy_in_memory, opened=opened)
        for name in () if self._disk is None else names_in(self._disk / run):
            match = _RANK.fullmatch(name)
            if match is not None and self._disk is not None:
                owner, path = int(match[1]), self._disk / run / name
                yield from (
                    (stored, True, copy_in_file) for stored in committed_in(path, owner, owner)
                )


def copy_in_memory(path: Path, opened: Opener = TwinWindow.open) -> Copy:
    """Map a window, by default a stub and its base; errors as of `opened`."""
    window = opened(path)
    return Copy(path, window.verify_identity(Expected()), window.record, mapped=True)


def copy_in_file(path: Path) -> Copy:
    """A copy that is read without mapping it; `RefusedWindow` if it is unreadable."""
    with WindowReader(path) as reader:
        headers = reader.verify_identity(Expected())

    def data(slot: int, record: Record) -> memoryview:
        with WindowReader(path) as reader:
            return memoryview(reader.read_record(slot, record))

    return Copy(path, headers, data, mapped=False)
