# SPDX-License-Identifier: Apache-2.0
"""Windows that cannot be listed or read now are not absent: tried again, then refused by name.

Real directories; the file system fails below one of them.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.errors import HostMemoryError, UserError
from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.ledger import Ledger
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.shelf import Shelf
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import TRIES, RankIdentity, Window
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.settings import Layout
from moevement_ext.recover import inventory
from moevement_ext.recover.absence import refuse_to_forget
from moevement_ext.recover.conversion import Conversion
from moevement_ext.recover.reshard import found as other_layouts
from moevement_ext.recover.reshard.found import Elsewhere, merged, require_parts
from moevement_ext.recover.whole_job import obtain
from moevement_ext.replicate.client import PeerLost
from tests.unit.memory.samples import capacity, commit, digest, identity_of, make_file, named
from tests.unit.recover.reshard import test_resharded as resharded
from tests.unit.recover.test_sources import predecessor_with, replicate
from tests.unit.replicate.test_host_memory import CANDIDATE, Job

pytestmark = pytest.mark.timeout(300)

FOR_EVER = 10**6
IDENTITY = identity_of(0)
CONFIG = SparseCheckpointConfig()
Decide = Callable[[], bool]
"""True: a window is gone on from; False: the job starts over."""


class Failing:
    """The next `left` calls that list, or open a window, below a directory fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.below, self.call, self.number, self.left = Path('/none'), '', 0, 0
        for call in ('listdir', 'open'):
            monkeypatch.setattr(os, call, self._instead(call, getattr(os, call)))
        monkeypatch.setattr('moevement_ext.memory.window.name.READ_AGAIN_S', 0.0)

    def _instead(self, call: str, really: Callable[..., Any]) -> Callable[..., Any]:
        def instead(path: Any = '.', *others: Any, **named: Any) -> Any:
            hit = self.left and call == self.call and Path(path).is_relative_to(self.below)
            if hit and (call == 'listdir' or Path(path).name.startswith('window-')):
                self.left -= 1
                raise OSError(self.number, os.strerror(self.number), str(path))
            return really(path, *others, **named)

        return instead


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


class Alone:
    """Exchanges of a rank whose peers have nothing to say."""

    def __call__(self, name: str, mine: bytes) -> list[bytes]:
        return [mine, b'']

    def all_agree(self, name: str, mine: bool) -> bool:
        return mine


class Obtaining:
    """Rank 0 has lost its window; rank 1 holds it, and loses connections at first."""

    def __init__(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job, self.memory = job, job.ranks[0]
        self.asked = self.lost = self.checked = 0
        self.told: list[object] = []
        file = job.commit(0)
        self.digest = digest(file.path)
        replicate(job, file)
        self.memory.windows.discard(named(0))
        self._inventories = job.inventories()
        self._fetch = self.memory.fetch
        monkeypatch.setattr(self.memory, 'fetch', self._fetch_with_losses)

    def _fetch_with_losses(self, window: Window, holder: int, *others: Any) -> WindowFile:
        self.asked += 1
        if self.asked <= self.lost:
            raise PeerLost('the connection is lost')
        return self._fetch(window, holder, *others)

    def obtain(self, refuse: bool = False, forget: bool = False) -> Conversion | None:
        def check(header: object) -> None:
            self.checked += 1
            if refuse:
                raise RefusedWindow('of another model')

        rank = SimpleNamespace(
            number=0,
            identity=IDENTITY,
            exchange=Alone(),
            config=SparseCheckpointConfig(forget=forget),
            events=SimpleNamespace(emit=self.told.append),
        )
        predecessor = predecessor_with(self._inventories, CANDIDATE)
        return obtain(self.memory, predecessor, rank, check)  # type: ignore[arg-type]


@pytest.fixture
def obtaining(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Obtaining]:
    job = Job(shm, monkeypatch)
    yield Obtaining(job, monkeypatch)
    job.stop()


def of_stock(store: NodeStore, disk: DiskWindows | None = None) -> bool:
    found = inventory.take_stock(store, disk, IDENTITY)
    held = [*found.memory, *found.disk]
    if inventory.candidates(held, 1) or 'before' in found.traces.renamed:
        return True
    refuse_to_forget(held, [found.traces], -1, CONFIG)
    return False


def in_own_memory(shm: Path, disk: Path) -> tuple[Path, Decide]:
    store = NodeStore(shm, 'run1', 'node0')
    commit(OwnerWindows(store, 0, 0, capacity()), 6)
    return store.owner_path(0, 0), lambda: of_stock(store)


def on_own_disk(shm: Path, disk: Path) -> tuple[Path, Decide]:
    windows = DiskWindows(disk, 'run1', 0)
    windows.write(make_file(shm / 'memory', 6), IDENTITY)
    windows.note_complete(6)
    return windows.path, lambda: of_stock(NodeStore(shm, 'run1', 'node0'), windows)


def under_a_former_name(shm: Path, disk: Path) -> tuple[Path, Decide]:
    before = NodeStore(shm, 'run1', 'before')
    commit(OwnerWindows(before, 3, 0, capacity()), 6)
    before.close()
    return before.path, lambda: of_stock(NodeStore(shm, 'run1', 'node0'))


def of_other_layout(shm: Path, disk: Path | None) -> bool:
    shelf = Shelf(NodeStore(shm, resharded.NEW, 'a'), disk)
    identity = RankIdentity('new', 'new', 0, placed=resharded.placed(0, Layout(2, data=2)))
    found = other_layouts.take_stock(identity, SparseCheckpointConfig(dir=str(shm)), shelf)
    everything = merged([found])
    if any(not one.missing for one in everything):
        return True
    assert not found.runs, 'nothing there is freed later'
    require_parts(Elsewhere([], found.runs, everything, found.unread), -1)
    return False


def in_another_layout(shm: Path, disk: Path) -> tuple[Path, Decide]:
    resharded.leave(shm, {'a': [(owner, owner) for owner in range(resharded.OWNERS)]})
    return shm / resharded.OLD / 'a' / '1', lambda: of_other_layout(shm, None)


def on_disk_in_another_layout(shm: Path, disk: Path) -> tuple[Path, Decide]:
    in_another_layout(shm, disk)
    for path in shm.glob(f'{resharded.OLD}/a/*/*/window-*'):
        place = disk / resharded.OLD / f'rank{path.parent.name}'
        place.mkdir(parents=True, mode=0o700)
        shutil.copy2(path, place)
    shutil.rmtree(shm / resharded.OLD)
    return disk / resharded.OLD / 'rank1', lambda: of_other_layout(shm, disk)


def the_root_of_layouts(shm: Path, disk: Path) -> tuple[Path, Decide]:
    in_another_layout(shm, disk)
    return shm, lambda: of_other_layout(shm, None)


PLACES = [
    in_own_memory,
    on_own_disk,
    under_a_former_name,
    in_another_layout,
    on_disk_in_another_layout,
    the_root_of_layouts,
]
NUMBERS = [errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES, errno.ENOMEM]


def windows_below(*roots: Path) -> list[Path]:
    return sorted(path for root in roots for path in root.rglob('*.window'))


def decided(failing: Failing, left: int, decide: Decide) -> bool:
    failing.left = left
    try:
        return decide()
    finally:
        failing.left = 0


@pytest.mark.parametrize('place', PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize('call', ['listdir', 'open'])
@pytest.mark.parametrize('number', NUMBERS, ids=errno.errorcode.get)
def test_failing_file_system_is_no_absence(
    number: int,
    call: str,
    place: Callable[[Path, Path], tuple[Path, Decide]],
    failing: Failing,
    shm: Path,
    tmp_path: Path,
) -> None:
    failing.below, decide = place(shm, tmp_path)
    failing.call, failing.number = call, number
    before = windows_below(shm, tmp_path)
    assert decided(failing, TRIES - 1, decide), 'the error passes'
    with pytest.raises(UserError, match=f'{os.strerror(number)}.*--sparse-ckpt-forget') as refused:
        decided(failing, FOR_EVER, decide)
    assert str(failing.below) in str(refused.value)
    assert windows_below(shm, tmp_path) == before


@pytest.mark.parametrize('call', ['listdir', 'open'])
@pytest.mark.parametrize('number', NUMBERS, ids=errno.errorcode.get)
def test_living_holder_that_cannot_read_is_asked_again(
    number: int, call: str, failing: Failing, obtaining: Obtaining
) -> None:
    def decide() -> bool:
        return obtaining.obtain() is not None

    failing.below = obtaining.job.ranks[1].store.path
    failing.call, failing.number = call, number
    before = windows_below(failing.below)
    with pytest.raises(UserError, match=f'rank 1: .*{os.strerror(number)}'):
        decided(failing, FOR_EVER, decide)
    assert decided(failing, TRIES - 1, decide), 'the error passes'
    assert windows_below(failing.below) == before


@pytest.mark.parametrize('disk_only', [True, False])
@pytest.mark.parametrize('lost', ['its disk', 'its memory', 'both'])
def test_one_place_does_not_excuse_another(
    lost: str, disk_only: bool, shm: Path, tmp_path: Path
) -> None:
    traces, held = [], []
    for rank in range(2):
        identity = identity_of(rank)
        store = NodeStore(shm / f'node{rank}', 'run1', f'node{rank}')
        disk = DiskWindows(tmp_path, 'run1', rank)
        if rank == 0 or lost == 'its memory':
            disk.write(make_file(tmp_path / f'memory{rank}', 3, owner=rank), identity)
            disk.note_complete(3)
            disk.set_aside_after(-1 if rank == 1 else 3, identity)
        if rank == 0 or lost == 'its disk':
            windows = OwnerWindows(store, rank, rank, capacity())
            ledger = Ledger(store.ledger_path(rank), 4, identity)
            ledger.note_complete(6)
            ledger.close()
            if rank == 0:
                commit(windows, 6)
        found = inventory.take_stock(store, disk, identity, disk_only)
        traces.append(found.traces)
        held += [*found.memory, *found.disk]
        disk.close()
        store.close()
    config = SparseCheckpointConfig(dir='/shm', disk='/disk')
    if lost == 'its memory' and disk_only:  # which is no source; the disk tells of a deletion
        refuse_to_forget(held, traces, -1, config)
        return
    with pytest.raises(UserError, match='Mount what is not mounted') as refused:
        refuse_to_forget(held, traces, -1, config)
    said = str(refused.value)
    assert ('--sparse-ckpt-disk /disk of' in said) == (lost != 'its memory')
    assert ('--sparse-ckpt-dir /shm' in said) == (lost != 'its disk' and not disk_only)


def test_nothing_is_deleted_in_a_directory_that_cannot_be_listed(
    failing: Failing, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(shm, monkeypatch)
    store = job.ranks[0].store
    job.commit(0)
    disk = DiskWindows(tmp_path, 'run1', 0)
    disk.write(make_file(tmp_path / 'memory', 6), IDENTITY)
    before = windows_below(shm, tmp_path)

    def again() -> None:
        with pytest.raises(HostMemoryError, match='Input/output error'):
            OwnerWindows(store, 0, 0, capacity())

    failing.call, failing.number, failing.left = 'listdir', errno.EIO, FOR_EVER
    for below, delete in (
        (store.path, again),
        (store.path, lambda: store.remove_owners_but((), 0)),
        (store.path, lambda: store.remove_holders_but(())),
        (store.path, store.remove_unused),
        (store.path, job.ranks[0].give_up),
        (disk.path, lambda: disk.remove(10)),
    ):
        failing.below = below
        delete()
        assert windows_below(shm, tmp_path) == before
    failing.left = 0
    job.ranks[1].close(remove=False)


# What the whole job obtains


@pytest.mark.parametrize('failing', [1, 100])
def test_failing_reads_of_a_disk_do_not_start_the_job_over(
    failing: int, obtaining: Obtaining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('moevement_ext.memory.window.name.READ_AGAIN_S', 0.0)
    job, memory = obtaining.job, obtaining.memory
    obtaining.lost = 100
    memory.disk = DiskWindows(tmp_path, 'run1', 0)
    memory.disk.write(job.commit(0), IDENTITY)
    memory.windows.discard(named(0))
    really, failures = os.preadv, iter(range(failing))

    def preadv(*arguments: Any) -> int:
        if next(failures, None) is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really(*arguments)

    monkeypatch.setattr(os, 'preadv', preadv)
    if failing == 1:
        found = obtaining.obtain()
        assert found is not None and found.tier == 'disk'
    else:
        with pytest.raises(UserError, match=r'rank 0: .*Input/output error.*--sparse-ckpt-forget'):
            obtaining.obtain()
        assert obtaining.obtain(forget=True) is None
    memory.disk.close()
