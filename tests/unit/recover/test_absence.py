# SPDX-License-Identifier: Apache-2.0
"""Where parts of windows are not there a job refuses to start, rather than forget the others."""

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from moevement_ext.config import SparseCheckpointConfig, node_name
from moevement_ext.errors import UserError
from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.holder_lock import HolderLock
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import HeldWindow, RankIdentity, Window, committed_name
from moevement_ext.memory.window.settings import RunSettings, encode
from moevement_ext.recover.absence import DISK, MEMORY, Traces, name_other_runs, refuse_to_forget
from moevement_ext.recover.inventory import take_stock
from tests.unit.memory.samples import (
    RUN,
    TOPOLOGY,
    WINDOW,
    capacity,
    commit,
    make_file,
    make_header,
    named,
    tmpfs_directory,
)

CONFIG = SparseCheckpointConfig(disk='/mnt/windows')
IDENTITY = RankIdentity(RUN, TOPOLOGY, 0)


def held(start: int, *owners: int) -> list[HeldWindow]:
    return [HeldWindow(Window(named(start), WINDOW), owner) for owner in owners]


def traces(*known: int, files: tuple[int, ...] = ()) -> list[Traces]:
    return [
        Traces(f'node{rank}', start, [DISK] if rank in files else [])
        for rank, start in enumerate(known)
    ]


def refusal(*arguments: object) -> str:
    with pytest.raises(UserError) as refused:
        refuse_to_forget(*arguments)  # type: ignore[arg-type]
    assert '\n' not in str(refused.value)
    return str(refused.value)


def test_refusal_names_ranks_without_windows_and_the_windows_of_others() -> None:
    parts = [*held(24, 0, 2), *held(27, 0, 2)]
    said = refusal(parts, traces(27, -1, 27, files=(0, 2)), -1, CONFIG)
    assert 'all ranks had window 27' in said and '--sparse-ckpt-disk /mnt/windows' in said
    assert 'of rank 1 (node node1)' in said
    assert 'ranks 0, 2 (nodes node0, node2) have windows 24, 27' in said
    assert '--sparse-ckpt-forget goes on from the start' in said


def test_ranks_with_only_outdated_windows_are_named_and_many_are_not_all_listed() -> None:
    parts = [*held(24, 0, 2), *held(27, 0, 2), *held(3, 1)]
    refuse_to_forget(parts, traces(27, 3, 27, files=(0, 1, 2)), -1, CONFIG)  # it is damaged there
    assert 'rank 1' in refusal(parts, traces(27, 3, 27, files=(0, 2)), -1, CONFIG)
    said = refusal(held(27, *range(50)), traces(*[27] * 50, *[-1] * 50), 27, CONFIG)
    assert 'ranks 50, 51, 52, 53, 54, 55, 56, 57 and 42 more' in said
    assert 'from the dense checkpoint of iteration 27' in said


@pytest.mark.parametrize(
    ('known', 'dense_iteration', 'files', 'forget'),
    [
        (-1, -1, (), False),
        (27, 28, (), False),
        (27, -1, (1,), False),
        (27, -1, (), True),
    ],
    ids=['none was complete', 'dense is newer', 'what is there is refused', 'told to forget'],
)
def test_harmless_absence_is_not_refused(
    known: int, dense_iteration: int, files: tuple[int, ...], forget: bool
) -> None:
    config = SparseCheckpointConfig(forget=forget)
    refuse_to_forget(held(27, 0), traces(known, -1, files=files), dense_iteration, config)
    if known >= 0:
        refuse_to_forget([], traces(known, -1), -1, SparseCheckpointConfig())


def test_former_name_of_a_node_is_reported() -> None:
    renamed = [Traces('pod-7', -1, [], {'pod-1': 24}), Traces('pod-8', -1, [], {})]
    said = refusal([], renamed, -1, SparseCheckpointConfig())
    assert 'pod-7' in said and 'has window 24 of this run' in said
    assert 'MOEVEMENT_NODE=pod-1' in said and 'goes on from the start without them' in said
    assert 'the dense checkpoint of iteration 24' in refusal([], renamed, 24, CONFIG)
    refuse_to_forget([], renamed, 25, CONFIG)
    refuse_to_forget([], renamed, -1, SparseCheckpointConfig(forget=True))
    assert said == refusal(held(24, 1), renamed, -1, SparseCheckpointConfig())
    emulated = [renamed[0], Traces('pod-1', -1, [])]
    refuse_to_forget([], emulated, -1, CONFIG)


@pytest.fixture
def store(shm: Path) -> NodeStore:
    return NodeStore(shm, 'run1', 'node0')


@pytest.mark.parametrize('where', ['memory', 'disk'])
def test_windows_of_another_release_stay(where: str, store: NodeStore, tmp_path: Path) -> None:
    disk = DiskWindows(tmp_path, 'run1', 0)
    if where == 'memory':
        windows = OwnerWindows(store, 0, 0, capacity())
        path = commit(windows, 6).path
    else:
        disk.write(make_file(tmp_path / 'memory', 6), IDENTITY)
        (path,) = (stored.path for stored in disk.stored())
    with open(path, 'r+b') as file:
        file.seek(8)  # behind the magic
        file.write((1).to_bytes(4, 'little'))
    stock = take_stock(store, disk, IDENTITY)
    others = Traces('node1', -1, [])
    said = refusal([], [others, stock.traces], 6, CONFIG)
    assert f'{node_name()} has window 6 of this run' in said and 'format version 1' in said
    assert 'start the job with that release; --sparse-ckpt-forget' in said
    refuse_to_forget([], [others, stock.traces], 7, CONFIG)
    refuse_to_forget([], [others, stock.traces], -1, SparseCheckpointConfig(forget=True))
    disk.close()
    store.close()


@pytest.mark.parametrize('why', ['open to other users', 'a second name', 'Input/output error'])
def test_window_that_cannot_be_read_now_is_not_trained_over(
    why: str, store: NodeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = OwnerWindows(store, 0, 0, capacity())
    path = commit(windows, 6).path
    disk = None
    if why == 'open to other users':
        path.chmod(0o640)
    elif why == 'a second name':
        (store.root / 'kept').hardlink_to(path)
    else:
        disk = DiskWindows(tmp_path, 'run1', 0)
        disk.write(windows.files()[0], IDENTITY)
        windows.discard(named(6))

        def failing(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, 'preadv', failing)
    found = take_stock(store, disk, IDENTITY).traces
    said = refusal(held(6, 1), [found, Traces('node1', 6, [MEMORY])], -1, CONFIG)
    assert f'{node_name()} has window 6 of this run' in said and why in said
    assert 'window-6-plan1.window' in said and 'chmod 600' in said and 'or remove it' not in said
    refuse_to_forget(held(6, 1), [found], 7, CONFIG)
    refuse_to_forget(held(6, 1), [found], -1, SparseCheckpointConfig(forget=True))
    if disk is not None:  # its bytes, once they can be read, must not mix with a later history
        disk.set_aside_after(-1, IDENTITY)
        assert not disk.stored()
        disk.close()
    store.close()


@pytest.mark.parametrize('why', [None, 'it is of another run', 'it lives', 'its own is here, too'])
def test_windows_under_another_name_are_noticed(why: str | None, store: NodeStore) -> None:
    nodes = [NodeStore(store.root, 'run1', 'before')]
    if why == 'its own is here, too':
        nodes.append(store)
    for node in nodes:
        windows = OwnerWindows(node, 3, 1, capacity())
        for start in 0, 6:
            commit(windows, start)
        if why != 'it lives':
            node.close()
    identity = RankIdentity('other' if why == 'it is of another run' else RUN, TOPOLOGY, 0)
    found = take_stock(store, None, identity).traces
    assert found.renamed == ({'before': 6} if why is None else {})
    for node in nodes:
        node.close()


# Other runs, one of which was probably meant

FLAGS = {f'--flag-{n}': '1' for n in range(9)}


@pytest.fixture
def root() -> Iterator[Path]:
    with tmpfs_directory() as shm:
        yield with_window(shm)


def with_window(shm: Path) -> Path:
    before = NodeStore(shm, 'run-before', 'node0')
    before.lock(0)
    folder = before.holder_path(0) / '0'
    folder.mkdir(mode=0o700)
    file = WindowFile.create(folder / committed_name(named(6)), capacity())
    file.begin(named(6))
    settings = encode(RunSettings({'--sparse-ckpt-run-id': 'run-before', '--lr': '0.1', **FLAGS}))
    for slot in range(WINDOW):
        header = make_header(slot, start=6)
        file.reserve_slot(slot, header.payload_bytes)
        file.seal_slot(msgspec.structs.replace(header, settings=b'' if slot else settings))
    before.close()
    # As in a container that was started again.
    (before.holder_path(0) / 'lock').write_text(f'{os.getpid()} on node0')
    return shm


def said(
    root: Path,
    caplog: pytest.LogCaptureFixture,
    run_id: str | None = None,
    strict: bool = False,
    **flags: str,
) -> str:
    settings = RunSettings({'--sparse-ckpt-run-id': 'run-now', '--lr': '0.1', **FLAGS, **flags})
    rank = SimpleNamespace(
        run_id='run-now',
        number=0,
        exchange=lambda name, own: [own],
        config=SparseCheckpointConfig(run_id=run_id, strict=strict),
        identity=RankIdentity('now', TOPOLOGY, 0, settings),
    )
    with caplog.at_level(logging.WARNING):
        name_other_runs(NodeStore(root, 'run-now', 'node0'), rank)  # type: ignore[arg-type]
    return caplog.text


@pytest.mark.parametrize(
    ('flags', 'named'),
    [
        (
            {'--lr': '0.2'},
            'differs in --lr: was 0.1, is 0.2. To go on from them launch',
        ),
        ({}, 'as that was, with --sparse-ckpt-run-id run-before.'),
        (dict.fromkeys(FLAGS, '2'), ''),  # another job
    ],
)
def test_run_that_was_probably_meant_is_named(
    flags: dict[str, str], named: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / 'a file').write_text('')
    (root / 'run-broken' / 'node0' / '0' / '0').mkdir(parents=True, mode=0o700)
    text = said(root, caplog, **flags)
    assert named in text and bool(text) == bool(named)
    assert not named or 'windows of run-before, from iteration 6 on' in text


def test_strict_start_stops_at_a_run_that_differs_in_its_id_alone(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match='-strict: .*with --sparse-ckpt-run-id run-before'):
        said(root, caplog, strict=True)
    caplog.clear()
    assert said(root, caplog, run_id='run-now', strict=True) == ''
    assert 'run-before' in said(root, caplog, strict=True, **{'--lr': '0.2'})


def test_live_job_is_ignored(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = HolderLock(root / 'run-before' / 'node0' / '0' / 'lock')
    assert said(root, caplog) == ''
    lock.release()
