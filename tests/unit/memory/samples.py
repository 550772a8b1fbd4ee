# SPDX-License-Identifier: Apache-2.0
"""Small real windows in a real tmpfs, shared by the tests of the store and of replication."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import window_capacity
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import RankIdentity, WindowName
from moevement_ext.memory.window.slot import (
    FORMAT_VERSION,
    Record,
    SlotHeader,
    align_up,
    frame_bytes_bound,
)

RUN = 'run-digest'
TOPOLOGY = 'topology-digest'
PLAN = 'plan1'
SECRET = bytes(range(32))
WINDOW = 3
TENSOR_BYTES = (1000, 64, 4096)


def identity_of(rank: int) -> RankIdentity:
    """Identity of a rank in the run of the samples."""
    return RankIdentity(RUN, TOPOLOGY, rank)


def named(start: int = 0, plan: str = PLAN) -> WindowName:
    return WindowName(start, plan)


@contextmanager
def tmpfs_directory() -> Iterator[Path]:
    """A directory in /dev/shm if that is writable, else among the temporary files."""
    shm = Path('/dev/shm')
    parent = shm if os.access(shm, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix='moevement-test-', dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def make_header(
    slot: int, start: int = 0, plan: str = PLAN, owner: int = 0, window: int = WINDOW
) -> SlotHeader:
    """A header, not sealed, of three tensors of one operator."""
    records, offset = [], 0
    for index, nbytes in enumerate(TENSOR_BYTES):
        name = f'decoder.layers.{slot}.weight{index}'
        records.append(
            Record(
                operator=f'expert-{index}',
                tensor=name,
                part='master',
                dtype='float32',
                start=0,
                end=nbytes // 4,
                offset=offset,
                nbytes=nbytes,
            )
        )
        offset = align_up(offset + nbytes)
    return SlotHeader(
        version=FORMAT_VERSION,
        run=RUN,
        topology=TOPOLOGY,
        owner=owner,
        start=start,
        window=window,
        slot=slot,
        iteration=start + slot,
        plan=plan,
        payload_bytes=offset,
        records=records,
        context=b'rng state',
    )


def capacity(window: int = WINDOW) -> int:
    """Bytes of a file for such a window."""
    headers = [make_header(slot, window=window) for slot in range(window)]
    return window_capacity((h.payload_bytes, frame_bytes_bound(h)) for h in headers)


def content(header: SlotHeader) -> np.ndarray:
    """The payload of a slot; it differs by owner, iteration and plan."""
    key = f'{header.owner}/{header.iteration}/{header.plan}'.encode()
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], 'little')
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, header.payload_bytes, dtype=np.uint8)


def write_slot(file: WindowFile, slot: int, owner: int = 0, window: int = WINDOW) -> SlotHeader:
    """Reserve, fill and seal one slot of the window that `file` was begun for."""
    name = file.required_name()
    header = make_header(slot, name.start, name.plan, owner, window)
    file.reserve_slot(slot, header.payload_bytes)[:] = content(header)
    return file.seal_slot(header)


def write_window(file: WindowFile, owner: int = 0, window: int = WINDOW) -> None:
    """Fill a begun file with all slots."""
    for slot in range(window):
        write_slot(file, slot, owner, window)


def make_file(path: Path, start: int = 0, plan: str = PLAN, owner: int = 0) -> WindowFile:
    """A complete window in a file outside of any store."""
    file = WindowFile.create(path, capacity())
    file.begin(named(start, plan))
    write_window(file, owner)
    file.freeze()
    return file


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def begun(windows: OwnerWindows, start: int = 0, plan: str = PLAN) -> WindowFile:
    """A file for a new window, which there must be."""
    file = windows.begin(named(start, plan))
    assert file is not None
    return file


def commit(windows: OwnerWindows, start: int, plan: str = PLAN, window: int = WINDOW) -> WindowFile:
    file = begun(windows, start, plan)
    write_window(file, windows.owner, window)
    windows.commit(file)
    return file


def restart(store: NodeStore) -> NodeStore:
    """Reopen the store as a new process of the same run."""
    store.close()
    return NodeStore(store.root, store.run_id, store.path.name)
