# SPDX-License-Identifier: Apache-2.0
"""Limits of containers, read from copies of kernel files."""

import os
from pathlib import Path

import pytest

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.budget import SPARES, HostMemoryPlan, RankMemory
from moevement_ext.memory.file_system import GIB
from moevement_ext.memory.limits import _MemoryLeft, cores_left, memory_left

UNLIMITED = 9223372036854771712


class Machine:
    """Directories of control groups, and the kernel's files of one process."""

    def __init__(self, folder: Path) -> None:
        self.process = folder / 'process'
        self.process.mkdir()
        self.mount = folder / 'cgroup'

    def be_in(self, path: str, root: str = '/', version: int = 2) -> None:
        line = f'0::{path}' if version == 2 else f'4:cpu,memory:{path}\n0::/'
        kind = 'cgroup2 none rw' if version == 2 else 'cgroup none rw,cpu,memory'
        (self.process / 'cgroup').write_text(f'1:name=systemd:/x\n{line}\n')
        (self.process / 'mountinfo').write_text(
            f'22 1 0:5 / /proc rw shared:13 - proc proc rw\n'
            f'31 22 0:29 {root} {self.mount} rw,nosuid shared:9 - {kind}\n'
        )

    def group(self, path: str, limit: object, used: int, **stat: int) -> Path:
        return self._write(path, 'memory.max', limit, 'memory.current', used, stat)

    def group_v1(self, path: str, limit: int, used: int, **stat: int) -> Path:
        names = 'memory.limit_in_bytes', 'memory.usage_in_bytes'
        return self._write(path, names[0], limit, names[1], used, stat)

    def _write(
        self, path: str, limit: str, limited: object, usage: str, used: int, stat: dict[str, int]
    ) -> Path:
        group = self.mount / path
        group.mkdir(parents=True, exist_ok=True)
        (group / limit).write_text(f'{limited}\n')
        (group / usage).write_text(f'{used}\n')
        text = ''.join(f'{name} {value}\n' for name, value in stat.items())
        (group / 'memory.stat').write_text(text)
        return group


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_page_cache_counts_as_free_and_tmpfs_does_not(machine: Machine) -> None:
    machine.be_in('/job')
    files = {'inactive_file': 20, 'active_file': 5, 'file': 55, 'shmem': 30, 'inactive_anon': 40}
    group = machine.group('job', 1000, 900, **files)
    assert memory_left(machine.process) == _MemoryLeft(125, group)


@pytest.mark.parametrize('tightest', ['', 'slurm', 'slurm/job', 'slurm/job/step'])
def test_tightest_ancestor_group_counts(machine: Machine, tightest: str) -> None:
    machine.be_in('/slurm/job/step')
    machine.group('slurm/job/other', 1, 0)
    for path in ('slurm', 'slurm/job', 'slurm/job/step'):
        machine.group(path, 'max', 10)
    group = machine.group(tightest, 50, 10)
    assert memory_left(machine.process) == _MemoryLeft(40, group)


def test_usage_above_the_limit_leaves_nothing(machine: Machine) -> None:
    machine.be_in('/job')
    group = machine.group('job', 50, 60)
    assert memory_left(machine.process) == _MemoryLeft(0, group)


def test_group_of_a_container_is_found(machine: Machine) -> None:
    machine.be_in('/')  # with its own namespace
    group = machine.group('', 100, 30)
    assert memory_left(machine.process) == _MemoryLeft(70, group)
    machine.be_in('/docker/abc', root='/docker/abc')  # without a namespace
    assert memory_left(machine.process) == _MemoryLeft(70, group)


def test_memory_of_cgroups_version_1(machine: Machine) -> None:
    machine.be_in('/docker/abc', version=1)
    machine.group_v1('', UNLIMITED, 7)
    machine.group_v1('docker', UNLIMITED, 7)
    figures = {'inactive_file': 1, 'total_inactive_file': 20, 'total_active_file': 3}
    group = machine.group_v1('docker/abc', 1000, 900, **figures)
    assert memory_left(machine.process) == _MemoryLeft(123, group)


def test_missing_limits_are_unknown(machine: Machine) -> None:
    assert memory_left(machine.process) is None, 'no file'
    machine.be_in('/job')
    assert memory_left(machine.process) is None, 'no group'
    machine.group('job', 'max', 10)
    assert memory_left(machine.process) is None, 'no limit'


def test_memory_high_limits_as_well(machine: Machine) -> None:
    machine.be_in('/job')
    group = machine.group('job', 1000, 900)
    for high, left in (('max', 100), ('950', 50), ('2000', 100)):
        (group / 'memory.high').write_text(f'{high}\n')
        assert memory_left(machine.process) == _MemoryLeft(left, group)
    machine.group('job', 'max', 900)
    assert memory_left(machine.process) == _MemoryLeft(1100, group)


@pytest.mark.parametrize('available', [300, 10])
def test_machine_may_have_less_than_the_limit(machine: Machine, available: int) -> None:
    machine.be_in('/job')
    group = machine.group('job', 200 * 1024, 0)
    (machine.process.parent / 'meminfo').write_text(
        f'MemTotal: 900 kB\nMemAvailable:     {available} kB\nSwapFree: 900 kB\n'
    )
    limit = (200, group) if available == 300 else (10, None)
    assert memory_left(machine.process) == _MemoryLeft(limit[0] * 1024, limit[1])


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, 'sched_getaffinity', lambda process: set(range(8)))


@pytest.mark.parametrize(
    ('quota', 'cores'), [('250000 100000', 2.5), ('max 100000', 8.0), ('6400000 100000', 8.0)]
)
def test_cores_are_those_of_the_tightest_quota(
    quota: str, cores: float, machine: Machine, eight_cores: None
) -> None:
    machine.be_in('/pod/job')
    for path, limit in (('pod', quota), ('pod/job', 'max 100000')):
        (machine.group(path, 'max', 0) / 'cpu.max').write_text(f'{limit}\n')
    assert cores_left(machine.process) == cores


@pytest.mark.parametrize(('quota', 'cores'), [('150000', 1.5), ('-1', 8.0)])
def test_cores_of_cgroups_version_1(
    quota: str, cores: float, machine: Machine, eight_cores: None
) -> None:
    machine.be_in('/job', version=1)
    group = machine.group_v1('job', UNLIMITED, 0)
    (group / 'cpu.cfs_quota_us').write_text(f'{quota}\n')
    (group / 'cpu.cfs_period_us').write_text('100000\n')
    assert cores_left(machine.process) == cores


def test_limits_of_this_process_are_readable() -> None:
    left = memory_left()
    assert left is None or left.nbytes > 0


def test_plan_over_the_container_limit_is_refused(machine: Machine, shm: Path) -> None:
    machine.be_in('/job')
    group = machine.group('job', GIB, GIB // 4, inactive_file=GIB // 8)
    plan = HostMemoryPlan({0: RankMemory(own_windows=GIB, replicas=0, ledger=0)})
    with pytest.raises(HostMemoryError, match=f'1.00 GiB more.*{group} leaves 0.88 GiB.*--mem'):
        plan.check(None, shm / 'run1', machine.process)
    margin = GIB // 64
    machine.group('job', GIB + margin - 1, 0)
    with pytest.raises(HostMemoryError, match='and 0.02 GiB for processes that start later, but'):
        plan.check(None, shm / 'run1', machine.process)
    machine.group('job', GIB + margin, 0)
    plan.check(None, shm / 'run1', machine.process)
    meminfo = machine.process.parent / 'meminfo'
    meminfo.write_text(f'MemAvailable: {2**20} kB\n')
    with pytest.raises(HostMemoryError, match='the memory of this machine leaves 1.00 GiB. A larg'):
        plan.check(None, shm / 'run1', machine.process)


def test_hot_spares_count_only_while_memory_is_unreserved(
    machine: Machine, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spares start after the workers; once all is reserved, one may already be running."""
    machine.be_in('/job')
    machine.group('job', 2 * GIB, GIB // 4)
    plan = HostMemoryPlan({0: RankMemory(own_windows=GIB, replicas=0, ledger=0)})
    plan.check(None, shm / 'run1', machine.process)
    monkeypatch.setenv(SPARES, '2')
    with pytest.raises(HostMemoryError, match='hot spares take 1.00 GiB .--spares 0: none., but'):
        plan.check(None, shm / 'run1', machine.process)
    HostMemoryPlan({}).check(None, shm / 'run1', machine.process)


def test_reserved_files_are_not_counted_again(machine: Machine, shm: Path) -> None:
    machine.be_in('/job')
    machine.group('job', 2**20, 2**19)
    (shm / 'run1' / '0').mkdir(parents=True)
    (shm / 'run1' / '0' / 'window').write_bytes(bytes(2**19))
    rank = RankMemory(own_windows=2**20, replicas=0, ledger=0)
    HostMemoryPlan({0: rank}).check(None, shm / 'run1', machine.process)
