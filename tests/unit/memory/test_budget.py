# SPDX-License-Identifier: Apache-2.0
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory import budget
from moevement_ext.memory.budget import HostMemoryPlan, RankMemory
from moevement_ext.memory.file_system import GIB, reserved_bytes, warn_unless_in_memory
from moevement_ext.memory.mapped_file import in_pages
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.generations import OwnerWindows
from tests.unit.memory.samples import capacity, commit

UNKNOWN = Path('/nowhere/self')
"""Of a machine whose memory is not known; that of a tmpfs is larger than the machine's."""


@pytest.mark.parametrize('nbytes', [1, 2**20, 12 * 2**30 - 1])
def test_advised_flag_value_is_sufficient(shm: Path, nbytes: int) -> None:
    plan = HostMemoryPlan({0: RankMemory(own_windows=nbytes, replicas=0, ledger=0)})
    with pytest.raises(HostMemoryError) as refused:
        plan.check(0.5 * nbytes / GIB, shm)
    advised = re.search(r'Raise it to at least (\S+),', str(refused.value))
    assert advised is not None and 0 <= float(advised[1]) * GIB - nbytes <= GIB / 1000


def test_flag_is_per_node_and_inclusive(shm: Path) -> None:
    rank = RankMemory(own_windows=2**20, replicas=2**20, ledger=0)
    HostMemoryPlan({0: rank, 1: rank}).check(4 / 1024, shm)
    with pytest.raises(HostMemoryError, match=r'ckpt-host-memory-gb 0.0038.*lower --sparse-ckpt-r'):
        HostMemoryPlan({0: rank, 1: rank}).check(3.9 / 1024, shm)


def test_plan_over_the_free_space_is_refused(shm: Path) -> None:
    free = shutil.disk_usage(shm).free
    rank = RankMemory(own_windows=2 * free, replicas=0, ledger=0)
    with pytest.raises(HostMemoryError, match=rf'{shm}.* needs .* free.*tmpfs.* --sparse-ckpt-dir'):
        HostMemoryPlan({0: rank}).check(None, shm / 'run1' / 'node0')


def test_margin_of_dev_shm_stays_free(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    margin = shutil.disk_usage(shm).free // (budget.MARGIN_SHARE + 1)
    fitting = budget.MARGIN_SHARE * margin
    free = fitting + margin
    monkeypatch.setattr(budget, 'free_bytes', lambda directory: free)
    rank = RankMemory(own_windows=fitting, replicas=0, ledger=0)
    HostMemoryPlan({0: rank}).check(None, shm, UNKNOWN)
    full = HostMemoryPlan({0: msgspec.structs.replace(rank, replicas=budget.MARGIN_SHARE)})
    with pytest.raises(HostMemoryError, match=r'for what else lives in /dev/shm, but only'):
        full.check(None, shm, UNKNOWN)
    (shm / '0').mkdir()
    (shm / '0' / 'ledger').write_bytes(b'x' * 8192)
    full.check(None, shm, UNKNOWN)  # the margin was free when the job started
    monkeypatch.setattr(budget, 'SHARED', Path('/proc'))
    full.check(None, shm / 'elsewhere', UNKNOWN)
    with pytest.raises(HostMemoryError):
        HostMemoryPlan({0: msgspec.structs.replace(rank, replicas=free)}).check(None, shm, UNKNOWN)


def test_restart_needs_no_space_besides_its_files(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users of `/dev/shm` may have taken the space that was free at the start."""
    (shm / '0').mkdir()
    (shm / '0' / 'ledger').write_bytes(b'x' * 8192)
    monkeypatch.setattr(budget, 'free_bytes', lambda directory: 0)
    rank = RankMemory(own_windows=0, replicas=0, ledger=8192, beside=4096)
    HostMemoryPlan({0: rank}).check(None, shm)
    with pytest.raises(HostMemoryError):
        HostMemoryPlan({1: rank}).check(None, shm)


def test_adopted_files_count_as_reserved(shm: Path) -> None:
    store = NodeStore(shm, 'run1', 'node0')
    generations, size = 3, 64 * capacity()
    OwnerWindows(store, 0, 0, size, generations)
    store.close()
    adopted = reserved_bytes(store.path)
    assert generations * size <= adopted < generations * size + 2**20
    free = shutil.disk_usage(shm).free
    plan = HostMemoryPlan({0: RankMemory(own_windows=free + size, replicas=0, ledger=0)})
    plan.check(None, store.path, UNKNOWN)
    with pytest.raises(HostMemoryError):
        plan.check(None, shm / 'run2', UNKNOWN)


@pytest.mark.parametrize('state', ['committed', 'free'])
def test_files_of_another_size_are_not_adopted(
    state: str, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NodeStore(shm, 'run1', 'node0')
    windows, size = OwnerWindows(store, 0, 0, capacity()), 2 * capacity()
    if state == 'committed':
        for start in (0, 3):
            commit(windows, start)
    store.close()
    free, kept = 64 * size, 2 * in_pages(capacity()) * (state == 'free')
    beside = reserved_bytes(store.path) - 2 * in_pages(capacity())  # the lock
    monkeypatch.setattr(budget, 'free_bytes', lambda directory: free)
    for more in (0, 1):
        rank = RankMemory(own_windows=free + kept + beside + more, replicas=0, ledger=0)
        plan = HostMemoryPlan({0: rank}, [size])
        if more:
            with pytest.raises(HostMemoryError):
                plan.check(None, store.path)
        else:
            plan.check(None, store.path)
    HostMemoryPlan({0: RankMemory(free, in_pages(capacity()), 0)}, [capacity()]).check(
        None, store.path
    )


@pytest.mark.parametrize(
    ('mounts', 'local_rank', 'warnings'),
    [
        ({'/': 'ext4', '/scratch': 'tmpfs', '/scratch/win': 'xfs'}, 0, 0),
        ({'/': 'ext4', '/scratch': 'ramfs'}, 0, 0),
        ({'/': 'ext4', '/scratch': 'nfs4'}, 0, 1),
        ({'/': 'ext4', '/scratch': 'nfs4'}, 1, 0),
        ({}, 0, 0),
    ],
)
def test_one_rank_of_a_node_warns_of_a_directory_outside_of_memory(
    mounts: dict[str, str],
    local_rank: int,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts.items()]
    monkeypatch.setattr('psutil.disk_partitions', lambda all: found)
    monkeypatch.setenv('LOCAL_RANK', str(local_rank))
    warn_unless_in_memory(Path('/scratch/windows'))
    assert len(caplog.records) == warnings
    for record in caplog.records:
        said = record.getMessage()
        assert '--sparse-ckpt-dir /scratch/windows is on nfs4' in said and '/dev/shm' in said
