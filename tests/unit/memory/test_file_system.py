# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from moevement_ext.memory.file_system import file_system_type, warn_unless_in_memory

Mount = Callable[[dict[str, str]], None]


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Mount:
    """Set the mounts that the system reports."""

    def mounted(types: dict[str, str]) -> None:
        found = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in types.items()]
        monkeypatch.setattr('psutil.disk_partitions', lambda all: found)

    return mounted


def test_nearest_mount_counts_even_for_missing_paths(mount: Mount) -> None:
    mount({'/': 'ext4', '/nowhere/shm': 'tmpfs', '/nowhere/shm-not': 'xfs'})
    assert file_system_type(Path('/nowhere/shm')) == 'tmpfs'
    assert file_system_type(Path('/nowhere/shm/moevement/run')) == 'tmpfs'
    assert file_system_type(Path('/nowhere/shm-not/run')) == 'xfs'
    assert file_system_type(Path('/nowhere')) == 'ext4'


def test_dev_shm_is_a_tmpfs() -> None:
    assert file_system_type(Path('/dev/shm/moevement')) == 'tmpfs'


def test_unknown_file_system_causes_no_warning(
    mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    mount({})
    assert file_system_type(Path('/nowhere')) is None
    warn_unless_in_memory(Path('/nowhere'))
    assert not caplog.records


@pytest.mark.parametrize(('kind', 'warnings'), [('tmpfs', 0), ('ramfs', 0), ('nfs4', 1)])
def test_directory_outside_of_memory_causes_a_warning(
    kind: str, warnings: int, mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    mount({'/': 'ext4', '/scratch': kind})
    warn_unless_in_memory(Path('/scratch/windows'))
    assert len(caplog.records) == warnings
    for record in caplog.records:
        said = record.getMessage()
        assert '--sparse-ckpt-dir /scratch/windows is on nfs4' in said and '/dev/shm' in said


def test_one_rank_of_a_node_warns(
    mount: Mount, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount({'/': 'ext4'})
    monkeypatch.setenv('LOCAL_RANK', '1')
    warn_unless_in_memory(Path('/scratch'))
    assert not caplog.records
