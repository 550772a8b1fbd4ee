# SPDX-License-Identifier: Apache-2.0
"""Limits too small for a recovery are named, or raised if possible."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from moevement_ext.memory import limits

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
    """It serves the store to all ranks, and has the limit that it was started with."""
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
