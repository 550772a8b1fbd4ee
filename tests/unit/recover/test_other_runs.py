# SPDX-License-Identifier: Apache-2.0
"""A run that finds nothing names the one that was probably meant."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.errors import UserError
from moevement_ext.memory.holder_lock import HolderLock
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.directory import committed_name
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.settings import RunSettings, encode
from moevement_ext.recover.absence import name_other_runs
from tests.unit.memory.samples import (
    TOPOLOGY,
    WINDOW,
    capacity,
    make_header,
    named,
    tmpfs_directory,
)

FLAGS = {f'--flag-{n}': '1' for n in range(9)}


@pytest.fixture
def root() -> Iterator[Path]:
    with tmpfs_directory() as shm:
        yield with_window(shm)


def with_window(shm: Path) -> Path:
    store = NodeStore(shm, 'run-before', 'node0')
    store.lock(0)
    folder = store.holder_path(0) / '0'
    folder.mkdir(mode=0o700)
    file = WindowFile.create(folder / committed_name(named(6)), capacity())
    file.begin(named(6))
    settings = encode(RunSettings({'--sparse-ckpt-run-id': 'run-before', '--lr': '0.1', **FLAGS}))
    for slot in range(WINDOW):
        header = make_header(slot, start=6)
        file.reserve_slot(slot, header.payload_bytes)
        file.seal_slot(msgspec.structs.replace(header, settings=b'' if slot else settings))
    store.close()
    # As in a container that was started again.
    (store.holder_path(0) / 'lock').write_text(f'{os.getpid()} on node0')
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


def test_a_flag_that_was_mistyped_is_named(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = said(root, caplog, **{'--lr': '0.2'})
    assert 'windows of run-before, from iteration 6 on' in text
    assert 'differs in --lr: was 0.1, is 0.2. To go on from them launch as that was.' in text


def test_the_same_run_under_another_id_is_named(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert 'as that was, with --sparse-ckpt-run-id run-before.' in said(root, caplog)


@pytest.mark.parametrize('flags', [{}, {'--lr': '0.2'}])
def test_a_run_that_differs_in_its_id_alone_stops_a_strict_start(
    root: Path, caplog: pytest.LogCaptureFixture, flags: dict[str, str]
) -> None:
    if flags:
        assert 'run-before' in said(root, caplog, strict=True, **flags)
        return
    with pytest.raises(UserError, match='-strict: .*with --sparse-ckpt-run-id run-before'):
        said(root, caplog, strict=True)
    assert said(root, caplog, run_id='run-now', strict=True) == caplog.text


def test_other_job_is_ignored(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert said(root, caplog, **dict.fromkeys(FLAGS, '2')) == ''


def test_named_run_is_used(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert said(root, caplog, run_id='run-now') == ''


def test_live_job_is_ignored(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = HolderLock(root / 'run-before' / 'node0' / '0' / 'lock')
    assert said(root, caplog) == ''
    lock.release()


def test_foreign_directory_is_skipped(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / 'a file').write_text('')
    (root / 'run-broken' / 'node0' / '0' / '0').mkdir(parents=True, mode=0o700)
    assert 'run-before' in said(root, caplog)
