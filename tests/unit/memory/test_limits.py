# SPDX-License-Identifier: Apache-2.0
"""Limits of containers, read from copies of kernel files, and of processes: named, or raised."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory import limits
from moevement_ext.memory.budget import HostMemoryPlan, RankMemory
from moevement_ext.memory.file_system import GIB
from moevement_ext.memory.limits import _MemoryLeft, cores_left, memory_left

ROOT = Path(__file__).resolve().parents[3]


def output_under_limit(kind: str, soft: int, hard: int, uid: int = 0) -> list[str]:
    """Run a process under this limit: its soft limit afterwards, and the reported shortages."""
    program = (
        'import os, resource, sys\n'
        f'from moevement_ext.memory import limits\n'
        f'resource.setrlimit(resource.{kind}, ({soft}, {hard}))\n'
        f'os.setuid({uid}) if {uid} else None\n'
        f'found = limits.shortages(2, locks_memory=True)\n'
        f'print(resource.getrlimit(resource.{kind})[0], *found, sep="\\n")\n'
    )
    done = subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ('kind', 'least', 'remedy'),
    [
        ('RLIMIT_NOFILE', 40, 'ulimit -n'),
        ('RLIMIT_MEMLOCK', 8192, 'ulimit -l'),
        ('RLIMIT_NPROC', 1, 'ulimit -u'),
    ],
)
def test_soft_limit_is_raised_and_hard_limit_named(kind: str, least: int, remedy: str) -> None:
    _, most = resource.getrlimit(getattr(resource, kind))
    raised = output_under_limit(kind, least, most)
    if most == resource.RLIM_INFINITY or most > 2**30 or kind != 'RLIMIT_MEMLOCK':
        assert int(raised[0]) > least and not any(remedy in line for line in raised[1:])
    said = output_under_limit(kind, least, least, uid=54321 if os.geteuid() == 0 else 0)
    assert int(said[0]) == least
    (line,) = [line for line in said[1:] if remedy in line]
    assert str(least) in line


@pytest.mark.parametrize(('most', 'refused'), [(4096, False), (271, True), (272, False)])
def test_open_files_are_allowed_or_named_before_ranks_connect(most: int, refused: bool) -> None:
    program = (
        'import resource\n'
        'from moevement_ext.memory.limits import require_files\n'
        f'resource.setrlimit(resource.RLIMIT_NOFILE, (64, {most}))\n'
        'try: require_files(2)\n'
        'except Exception as error: print(error)\n'
        'print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n'
    )
    command = [sys.executable, '-c', program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    *said, limit = done.stdout.splitlines()
    assert int(limit) == min(most, 272) and bool(said) == refused
    assert all('272 open files, and the limit is 271: raise it' in line for line in said)


@pytest.mark.parametrize(('ranks', 'message'), [(2, False), (10**9, True)])
def test_soft_limit_of_the_agent_is_raised(ranks: int, message: bool) -> None:
    asks = f'from moevement_ext.memory import limits; print(limits.shortage_of_agent({ranks}))'
    agent = (
        'import resource, subprocess, sys\n'
        '_, most = resource.getrlimit(resource.RLIMIT_NOFILE)\n'
        'resource.setrlimit(resource.RLIMIT_NOFILE, (40, most))\n'
        f'subprocess.run([sys.executable, "-c", {asks!r}], check=True)\n'
        'print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n'
    )
    command = [sys.executable, '-c', agent]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    said, limit = done.stdout.splitlines()
    soft, most = map(int, limit.split())
    assert 40 < soft <= most
    assert (soft == most) == message
    assert ('ulimit -n 16000000256' in said and '--sparse-ckpt-store' in said) == message


def test_control_group_with_too_few_threads_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, 'processes_left', lambda process: 1)
    (line,) = [line for line in limits.shortages(2, locks_memory=False) if 'pids.max' in line]
    assert 'leaves 1' in line
    monkeypatch.setattr(limits, 'processes_left', lambda process: None)
    assert not [line for line in limits.shortages(2, locks_memory=False) if 'pids.max' in line]


@pytest.mark.parametrize('version', [1, 2])
def test_threads_left_are_those_of_the_tightest_group(tmp_path: Path, version: int) -> None:
    process, mount = tmp_path / 'process', tmp_path / 'cgroup'
    process.mkdir()
    line = '0::/pod/box' if version == 2 else '3:pids:/pod/box\n4:memory:/other'
    (process / 'cgroup').write_text(f'{line}\n')
    kind = 'cgroup2 none rw' if version == 2 else 'cgroup none rw,pids'
    (process / 'mountinfo').write_text(f'31 22 0:29 / {mount} rw shared:9 - {kind}\n')
    for path, limit in (('', '900'), ('pod', '50'), ('pod/box', 'max')):
        (mount / path).mkdir(parents=True, exist_ok=True)
        (mount / path / 'pids.max').write_text(f'{limit}\n')
        (mount / path / 'pids.current').write_text('20\n')
    assert limits.processes_left(process) == 30
    (mount / 'pod' / 'pids.max').write_text('max\n')
    (mount / 'pids.max').write_text('max\n')
    assert limits.processes_left(process) is None


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
    machine.group('job', 50, 60)
    assert memory_left(machine.process) == _MemoryLeft(0, group)


@pytest.mark.parametrize('tightest', ['', 'slurm', 'slurm/job', 'slurm/job/step'])
def test_tightest_ancestor_group_counts(machine: Machine, tightest: str) -> None:
    machine.be_in('/slurm/job/step')
    machine.group('slurm/job/other', 1, 0)
    for path in ('slurm', 'slurm/job', 'slurm/job/step'):
        machine.group(path, 'max', 10)
    group = machine.group(tightest, 50, 10)
    assert memory_left(machine.process) == _MemoryLeft(40, group)


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
    monkeypatch.setenv(limits.SPARES, '2')
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
