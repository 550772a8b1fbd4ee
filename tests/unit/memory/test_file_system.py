# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from moevement_ext.memory.file_system import file_system_type, warn_unless_in_memory

Mount = Callable[[dict[str, str]], None]


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Mount:
    """Makes the system say what is mounted where."""

    def mounted(types: dict[str, str]) -> None:
        found = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in types.items()]
        monkeypatch.setattr('psutil.disk_partitions', lambda all: found)

    return mounted


def test_the_nearest_mount_counts_also_for_what_is_not_there_yet(mount: Mount) -> None:
    mount({'/': 'ext4', '/nowhere/shm': 'tmpfs', '/nowhere/shm-not': 'xfs'})
    assert file_system_type(Path('/nowhere/shm')) == 'tmpfs'
    assert file_system_type(Path('/nowhere/shm/moevement/run')) == 'tmpfs'
    assert file_system_type(Path('/nowhere/shm-not/run')) == 'xfs'
    assert file_system_type(Path('/nowhere')) == 'ext4'


def test_dev_shm_is_known_here() -> None:
    assert file_system_type(Path('/dev/shm/moevement')) == 'tmpfs'


def test_a_system_that_does_not_tell_is_believed(
    mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    mount({})
    assert file_system_type(Path('/nowhere')) is None
    warn_unless_in_memory(Path('/nowhere'))
    assert not caplog.records


@pytest.mark.parametrize(('kind', 'warnings'), [('tmpfs', 0), ('ramfs', 0), ('nfs4', 1)])
def test_a_directory_that_is_not_in_memory_is_said_to_be(
    kind: str, warnings: int, mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    mount({'/': 'ext4', '/scratch': kind})
    warn_unless_in_memory(Path('/scratch/windows'))
    assert len(caplog.records) == warnings
    for record in caplog.records:
        said = record.getMessage()
        assert '--sparse-ckpt-dir /scratch/windows is on nfs4' in said and '/dev/shm' in said


def test_one_rank_of_a_node_says_it(
    mount: Mount, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount({'/': 'ext4'})
    monkeypatch.setenv('LOCAL_RANK', '1')
    warn_unless_in_memory(Path('/scratch'))
    assert not caplog.records
