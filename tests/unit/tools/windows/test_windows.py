# SPDX-License-Identifier: Apache-2.0
"""The operator's view of real window files, of jobs that live and of jobs that are gone."""

import errno
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.generations import OwnerWindows
from tests.unit.memory.samples import (
    PLAN,
    WINDOW,
    capacity,
    commit,
    make_file,
    named,
    tmpfs_directory,
    write_slot,
)
from tools.windows.__main__ import main
from tools.windows.export import launch_flags
from tools.windows.found import MEMORY, Found, complete, find
from tools.windows.pruning import live_runs

RANKS = 2


class Run:
    """Host memory of a job of two ranks, rank 1 of which also holds a replica of rank 0."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.store = NodeStore(root, name, 'node0')
        self.windows = [OwnerWindows(self.store, rank, rank, capacity()) for rank in range(RANKS)]
        self.replica = OwnerWindows(self.store, 1, 0, capacity())

    def commit(self, start: int) -> None:
        for windows in (*self.windows, self.replica):
            commit(windows, start)

    def files(self) -> set[str]:
        return {str(path.relative_to(self.store.path)) for path in self.store.path.rglob('*-*')}


@pytest.fixture
def root() -> Iterator[Path]:
    with tmpfs_directory() as path:
        yield path


@pytest.fixture
def run(root: Path) -> Iterator[Run]:
    run = Run(root, 'run1')
    run.commit(0)
    run.commit(3)
    yield run
    run.store.close()


def listed(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict:
    capsys.readouterr()
    assert main([*argv, '--json']) == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize('level', ['', 'run1', 'run1/node0', 'run1/node0/1'])
def test_list_shows_all_windows_from_any_level(
    level: str, root: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    found = listed(capsys, 'list', str(root / level))
    rows = {(one['rank'], one['holder'], one['start'], one['slots']) for one in found['files']}
    everything = {(0, 0), (1, 1), (0, 1)}
    there = everything if level != 'run1/node0/1' else {(1, 1), (0, 1)}
    assert rows == {(*place, start, 3) for place in there for start in (0, 3)}
    assert {one['run'] for one in found['files']} == {'run1'}
    assert {one['node'] for one in found['files']} == {'node0'}
    assert found['complete'] == {'run1': [f'3-{PLAN}', f'0-{PLAN}']}
    assert not any(one['verified'] for one in found['files'])


def test_verify_reads_payloads_and_names_damage(
    root: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    found = listed(capsys, 'verify', str(root))
    assert all(one['verified'] and one['problem'] is None for one in found['files'])
    file = run.windows[1].file(named(3))
    assert file is not None
    file.payload(2)[-1] ^= 1
    listed(capsys, 'list', str(root))  # headers are well
    found = listed(capsys, 'verify', str(root), status=1)
    (damaged,) = [one for one in found['files'] if one['problem'] is not None]
    assert damaged['path'] == str(file.path)
    assert 'slot 2' in damaged['problem'] and 'checksum mismatch' in damaged['problem']
    assert found['complete'] == {'run1': [f'0-{PLAN}']}


def test_a_window_that_one_rank_lacks_or_has_in_part_is_not_complete(
    root: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.windows[0].persisted(named(3))
    commit(run.windows[0], 6)
    run.windows[1].persisted(named(3))
    file = run.windows[1].begin(named(6))
    assert file is not None
    write_slot(file, 0, owner=1)
    found = listed(capsys, 'list', str(root))
    assert found['complete'] == {'run1': [f'3-{PLAN}']}
    (writing,) = [one for one in found['files'] if one['state'] == 'being written']
    assert writing['problem'] is None


def test_nothing_of_a_live_job_is_deleted(
    root: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run.files()
    assert main(['prune', str(root), '--keep', '0', '--yes']) == 0
    assert 'run1: a process of this run is alive: nothing is deleted' in capsys.readouterr().out
    assert run.files() == before


def test_two_that_look_at_a_dead_job_do_not_take_each_other_for_it(root: Path, run: Run) -> None:
    run.store.close()
    found = find(root)
    lock = next(root.rglob('lock'))
    with lock.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert live_runs(found) == []
    lock.unlink()
    lock.symlink_to(lock)
    with pytest.raises(OSError, match='symbolic'):
        live_runs(found)


def test_windows_of_the_earlier_layout_of_a_live_job_are_kept(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier, later = Run(root, 'run.aaaaaaaa'), NodeStore(root, 'run.bbbbbbbb', 'node0')
    earlier.commit(0)
    earlier.store.close()
    before = earlier.files()
    later.lock(0)  # it has no window yet
    assert main(['prune', str(root / 'run.aaaaaaaa'), '--keep', '0', '--yes']) == 0
    said = capsys.readouterr().out
    assert 'run.aaaaaaaa: a process of this run is alive: nothing is deleted' in said
    assert earlier.files() == before
    later.close()
    assert main(['prune', str(root), '--keep', '0', '--yes']) == 0
    assert not earlier.files()


def test_prune_keeps_the_window_that_all_nodes_have(
    root: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """All workers were killed when a window was whole on some nodes only, as far as this one sees:
    another node may have a replica of the missing part."""
    other = NodeStore(root, 'run1', 'node1')
    owners = [OwnerWindows(other, rank, rank, capacity()) for rank in (2, 3)]
    for windows in owners:
        commit(windows, 0)
    commit(owners[0], 3)
    run.store.close()
    other.close()
    before = run.files()
    assert main(['prune', str(other.path), '--keep', '1']) == 0
    assert 'would delete: 1 file' in capsys.readouterr().out  # a free one
    for node in run.store.path, other.path:
        assert main(['prune', str(node), '--keep', '1', '--yes']) == 0
    assert run.files() == before
    left = {str(path.relative_to(other.path)) for path in other.path.rglob('*.window')}
    of_both = {f'{rank}/{rank}/window-0-{PLAN}.window' for rank in (2, 3)}
    assert left == of_both | {f'2/2/window-3-{PLAN}.window'}


def test_prune_keeps_all_where_no_window_is_complete(root: Path, run: Run) -> None:
    """Ranks of other nodes may have the rest of the one that is whole there."""
    run.store.close()
    for path in root.rglob('1/1/window-*'):
        with open(path, 'r+b') as file:
            file.truncate(1000)
    before = run.files()
    assert main(['prune', str(root), '--keep', '1', '--yes']) == 0
    assert run.files() == before


def test_files_whose_deletion_was_cut_off_are_no_windows(root: Path, run: Run) -> None:
    former = run.store.holder_path(1).rename(run.store.path / 'former-1-99')
    run.store.close()
    assert complete(find(root))['run1'] == []
    assert main(['prune', str(root), '--yes']) == 0
    assert not list(former.rglob('*.window')) and len(run.store.scan()) == 2


def test_free_files_of_a_dead_job_are_pruned(root: Path, run: Run) -> None:
    run.windows[0].discard(named(3))
    run.store.close()
    assert main(['prune', str(root), '--keep', '2', '--yes']) == 0
    assert not any('free-' in name for name in run.files())


def test_windows_on_disk_are_recognised_regardless_of_the_run_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(RANKS):
        folder = tmp_path / '12345' / f'rank{rank}'
        folder.mkdir(parents=True)
        for start in (0, 3, 6):
            make_file(folder / f'window-{start}-{PLAN}.window', start, owner=rank)
        make_file(folder / f'aside-9-{PLAN}.window', 9, owner=rank)
    found = listed(capsys, 'verify', str(tmp_path))
    assert {(one['run'], one['tier'], one['holder']) for one in found['files']} == {
        ('12345', 'disk', None)
    }
    assert found['complete'] == {'12345': [f'{start}-{PLAN}' for start in (6, 3, 0)]}
    assert main(['prune', str(tmp_path), '--yes']) == 0
    left = {path.name for path in tmp_path.rglob('*.window')}
    assert left == {f'window-{start}-{PLAN}.window' for start in (3, 6)}
    (tmp_path / '12345' / 'rank1' / 'complete').write_text('3')
    assert main(['prune', str(tmp_path), '--keep', '1', '--yes']) == 0
    kept = {(path.parent.name, path.name) for path in tmp_path.rglob('*.window')}
    whole = {(f'rank{rank}', f'window-6-{PLAN}.window') for rank in range(RANKS)}
    assert kept == {*whole, ('rank1', f'window-3-{PLAN}.window')}


def test_windows_of_a_live_process_on_disk_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = DiskWindows(tmp_path, 'run1', 0)
    make_file(disk.path / f'window-0-{PLAN}.window')
    assert main(['prune', str(tmp_path), '--keep', '0', '--yes']) == 0
    assert 'run1: a process of this run is alive: nothing is deleted' in capsys.readouterr().out
    assert exported(tmp_path, tmp_path / 'dense', 'false') == 1
    assert 'run1: a process lives' in capsys.readouterr().err
    assert disk.has(named(0))
    disk.close()
    assert main(['prune', str(tmp_path), '--keep', '0', '--yes']) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('command', ['list', 'verify', 'prune'])
def test_unreadable_directory_is_not_an_empty_one(
    command: str,
    root: Path,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scandir = os.scandir

    def refusing(path: str) -> object:
        if str(path).endswith('node0'):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, 'scandir', refusing)
    assert main([command, str(root)]) == 2
    said = capsys.readouterr()
    assert said.err == f'windows: {run.store.path}: Permission denied; run as the user of the job\n'
    assert not said.out


def test_file_that_others_may_read_is_not_called_damaged(
    root: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.store.close()
    file = run.windows[1].file(named(3))
    assert file is not None
    file.path.chmod(0o644)
    found = listed(capsys, 'verify', str(root), status=2)
    (foreign,) = [one for one in found['files'] if one['foreign']]
    assert foreign['problem'] == (
        'is open to other users (mode -rw-r--r--): run as its owner, after chmod 600'
    )
    assert main(['prune', str(root), '--keep', '1', '--yes']) == 2
    assert f'{file.path}: is open to other users' in capsys.readouterr().err
    assert file.path.exists()


# Export; what it comes to: tests/distributed/test_export.py


def exported(directory: Path, output: Path, *command: str) -> int:
    windows = ['export', str(directory), '--to', 'torch_dist', '--output', str(output)]
    return main([*windows, '--', *command])


def saved_in(directory: Path, iteration: int) -> Path:
    directory.mkdir()
    (directory / 'latest_checkpointed_iteration.txt').write_text(f'{iteration}\n')
    return directory


def test_one_run_is_exported(
    root: Path, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Run(root, 'run2')
    other.commit(0)
    for one in (run, other):
        one.store.close()
    assert exported(root, tmp_path / 'dense', 'false') == 1
    assert 'name the directory of one run; there is run1, run2' in capsys.readouterr().err
    assert exported(root / 'run2', tmp_path / 'dense', 'false') == 1
    assert 'status 1 and saved no checkpoint in' in capsys.readouterr().err


def test_existing_checkpoint_is_neither_overwritten_nor_replaced_by_an_older_one(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.store.close()
    dense = saved_in(tmp_path / 'dense', 100)
    assert exported(run.root, dense, 'false') == 1
    assert f'--output {dense}: there is a checkpoint already' in capsys.readouterr().err
    assert exported(run.root, tmp_path / 'new', 'false', '--load', str(dense)) == 1
    assert f'--load {dense} has iteration 100' in capsys.readouterr().err


def test_the_run_is_launched_with_flags_that_have_the_last_word(run: Run, tmp_path: Path) -> None:
    run.store.close()
    said, dense = tmp_path / 'said', tmp_path / 'dense'
    program = tmp_path / 'launch.sh'
    tracker = f'{dense}/latest_checkpointed_iteration.txt'
    told = f'echo "$@" > {said}; test $MOEVEMENT_EXPORT = memory'
    program.write_text(f'{told} && mkdir {dense}; echo $SAVED > {tracker}\n')
    newest = listed_newest(run.root)
    command = ['env', f'SAVED={newest + 1}', 'sh', str(program), '--use-distributed-optimizer']
    assert exported(run.root, dense, *command) == 0
    flags = said.read_text().split()
    assert flags[0] == '--use-distributed-optimizer'
    assert dict(zip(flags[1:-1:2], flags[2::2], strict=True)) == {
        '--sparse-ckpt-dir': str(run.root.resolve()),
        '--sparse-ckpt-run-id': 'run1',
        '--save': str(dense),
        '--ckpt-format': 'torch_dist',
        '--save-interval': '1',
        '--exit-interval': '1',
    }
    assert flags[-1] == '--dist-ckpt-optim-fully-reshardable'


@pytest.mark.parametrize(
    'elastic', ['--sparse-ckpt-elastic restart', '--sparse-ckpt-elastic=restart']
)
def test_an_elastic_run_is_launched_by_its_own_name(elastic: str) -> None:
    """It finds the directory of its layout itself."""
    path = Path('/memory/run.0123abcd/node0/0/0/window-1-a.window')
    newest = Found(
        run='run.0123abcd', tier=MEMORY, rank=0, holder=0, node='node0', state='committed',
        nbytes=0, path=path,
    )  # fmt: skip
    own = ['--sparse-ckpt-dir', '/memory', '--sparse-ckpt-run-id']
    assert launch_flags(newest, Path('dense'), elastic.split())[:4] == [*own, 'run']
    assert launch_flags(newest, Path('dense'), [])[:4] == [*own, 'run.0123abcd']


RUN_ON = """
import sys
from pathlib import Path

given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
iteration = int(sys.argv[1])
while iteration < 100:
    iteration += 1
    ends = not iteration % int(given['--exit-interval'])
    if ends or not iteration % int(given['--save-interval']):
        Path(given['--save']).mkdir(exist_ok=True)
        Path(given['--save'], 'latest_checkpointed_iteration.txt').write_text(str(iteration))
    if ends:
        break
"""
"""Upstream's loop, from an iteration on: what it saves, and where it ends."""


@pytest.mark.parametrize('window', [0, 3, 12], ids=['older', 'newest', 'newer'])
def test_first_iteration_after_the_resumed_window_is_saved(
    window: int, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest may prove damaged, and other nodes may have a newer one than are seen here."""
    run.store.close()
    dense, dense_at = tmp_path / 'dense', window + WINDOW - 1
    assert exported(run.root, dense, sys.executable, '-c', RUN_ON, str(dense_at)) == 0
    assert f'iteration {dense_at + 1} is in {dense}' in capsys.readouterr().out


def listed_newest(root: Path) -> int:
    """Iteration that the newest window comes to when it is converted."""
    found = max(find(root), key=lambda one: one.start)
    assert found.slots is not None
    return found.start + found.slots - 1


def test_stubs_of_a_twin_belong_to_the_owner(root: Path, run: Run) -> None:
    """It goes with the rest of the run, and takes no part of it for a stranger's."""
    stub = run.store.stub_path(1, 0)
    run.replica.path.rename(stub)
    found = [one for one in find(root) if one.path.parent == stub]
    assert [(one.rank, one.holder, one.state, one.problem) for one in found] == [
        (0, 1, 'committed', None)
    ] * 2
    assert complete(find(root)) == {'run1': [str(named(3)), str(named(0))]}
    run.store.close()
    assert main(['prune', str(root), '--keep', '0', '--yes']) == 0
    assert not (root / 'run1').exists()
