# SPDX-License-Identifier: Apache-2.0
"""What must not be loaded is refused by name, the next tier is used, and no bit is harmed."""

import os
import re
import shutil
from pathlib import Path

import pytest

from moevement_ext.errors import EXIT_USER_ERROR
from moevement_ext.events import (
    NextTier,
    ProtectionReduced,
    Recovered,
    WindowPersisted,
    WorkerStarted,
)
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.damage import windows
from tests.distributed.harness.faults import PERSISTED, SETTLED
from tests.distributed.harness.setups import TWO_STAGES
from tests.distributed.test_whole_job_recovery import BASE
from tests.support.quick import with_quick

SAVES = ['--save-interval', '5']
TRACKER = 'latest_checkpointed_iteration.txt'


def _cut_off(dense: Path) -> None:
    part = max((dense / 'iter_0000008').glob('*.distcp'), key=lambda path: path.stat().st_size)
    os.truncate(part, part.stat().st_size // 2)


@pytest.mark.thorough
def test_newer_dense_checkpoint_is_preferred(
    cluster: Make, reference: Reference, tmp_path: Path
) -> None:
    dense = ['--save', str(tmp_path / 'dense'), '--load', str(tmp_path / 'dense')]
    job = cluster(*TWO_STAGES, *SAVES, *dense, '--sparse-ckpt-window', '6', ranks=2)
    job.run(fail_at='1:11:forward')
    job.finish()
    assert differences(reference(*TWO_STAGES, ranks=2), read_digest(job)) == []
    (tier,) = job.events_of(NextTier)
    assert 'iteration 10' in tier.tier and job.events_of(Recovered) == []


@pytest.mark.thorough
def test_windows_of_another_run_or_layout_are_refused(cluster: Make) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '3', *SETTLED)
    job.run(fail_at='1:9:forward')
    job.flags += ['--seed', '4321', '--expert-model-parallel-size', '1']
    job.finish()
    output = job.output(attempt=1)
    assert 'refused' in output
    assert job.events_of(Recovered) == []
    for change in ('--seed: was 1234, is 4321', '--expert-model-parallel-size: was 2, is 1'):
        assert change in output
        assert change.partition(':')[0] in job.events_of(NextTier)[-1].reason
    process = job.events_of(WorkerStarted)[-1].pid
    persisted = {e.start for e in job.events_of(WindowPersisted) if e.pid == process}
    assert {0, 3, 6} <= persisted, 'the refused windows do not stand in the way of new ones'


def test_data_blend_changed_in_place_is_refused(cluster: Make, tmp_path: Path) -> None:
    """Its iterations would be replayed on other samples than they were trained on."""
    blend = tmp_path / 'blend.txt'
    training = '--sparse-ckpt-window 3 --split 100,0,0 --eval-iters 0'.split()
    job = cluster(*TWO_STAGES, *training, *SETTLED, ranks=2)
    at = job.flags.index('--data-path')
    prefix = job.flags[at + 1]
    job.flags[at : at + 2] = ['--data-args-path', str(blend)]
    blend.write_text(f'0.7 {prefix} 0.3 {prefix}')
    assert -9 in job.run(fail_at='1:9:forward', mutation=PERSISTED)
    blend.write_text(f'0.2 {prefix} 0.8 {prefix}')
    job.flags.append('--sparse-ckpt-strict')
    assert job.run(all_end=True) == [EXIT_USER_ERROR, EXIT_USER_ERROR]
    assert '--sparse-ckpt-strict: windows of the run' in job.output(attempt=1)
    assert windows(job, node=0, holder=0, owner=0), 'they are there for the blend that was'
    job.flags.remove('--sparse-ckpt-strict')
    job.finish()
    assert job.events_of(Recovered) == []
    (tier,) = job.events_of(NextTier)
    assert re.search(r'--data-args-path \S+: was 0\.7 .*, is 0\.2 ', tier.reason)


# What happens to a folder of dense checkpoints between two launches.
UNREADABLE = {
    'an empty tracker file': lambda dense: os.truncate(dense / TRACKER, 0),
    'a checkpoint that is gone': lambda dense: shutil.rmtree(dense / 'iter_0000008'),
    'a checkpoint that is cut off': _cut_off,
    'a folder that is not mounted': shutil.rmtree,
}


def _said_in_one_line(job: Cluster, message: str) -> str:
    """Every rank has ended with a line that has `message`, and without a traceback; one of them."""
    output = job.output(attempt=0)
    said = [line for line in output.splitlines() if message in line]
    assert len(said) == job.ranks and all('error: ' in line for line in said), said
    assert 'Traceback' not in output
    return said[0]


def test_too_small_budget_is_refused_before_training(cluster: Make) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '3', '--sparse-ckpt-host-memory-gb', '0.001')
    assert job.run(all_end=True) == [EXIT_USER_ERROR] * 4
    _said_in_one_line(job, '--sparse-ckpt-host-memory-gb 0.001')
    assert ' iteration ' not in job.output(attempt=0)
    assert not list(job.memory.rglob('*.window'))


def test_full_memory_directory_disables_protection_with_a_message(
    cluster: Make, reference: Reference, small_tmpfs: Path
) -> None:
    job = cluster(*TWO_STAGES, '--sparse-ckpt-window', '3', ranks=2)
    job.flags += ['--sparse-ckpt-dir', str(small_tmpfs)]
    job.finish()
    assert differences(reference(*TWO_STAGES, ranks=2), read_digest(job)) == []
    assert 'TRAINING IS UNPROTECTED' in job.output(attempt=0)
    assert job.events_of(ProtectionReduced)


def test_memory_that_is_full_at_a_restart_loses_no_progress(
    cluster: Make, reference: Reference, limited_tmpfs: Path
) -> None:
    job = cluster(*TWO_STAGES, '--sparse-ckpt-window', '3', *SETTLED, ranks=2)
    job.flags += ['--sparse-ckpt-dir', str(limited_tmpfs)]
    job.run(fail_at='1:9:forward', mutation=PERSISTED)
    # Another program takes what is free, and all but the newest window of one rank is gone.
    *rest, newest = sorted((limited_tmpfs / job.name / 'node0' / '0' / '0').iterdir())
    assert rest and newest.name.startswith('window-6-')
    for path in rest:
        path.unlink()
    hog = limited_tmpfs / 'hog'
    with open(hog, 'wb') as file, pytest.raises(OSError, match='No space'):
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    assert all(code != 0 for code in job.run())
    assert 'mount a larger tmpfs' in job.output(attempt=1)
    hog.unlink()
    job.finish()
    assert differences(reference(*TWO_STAGES, ranks=2), read_digest(job)) == []
    assert len(job.events_of(Recovered)) == 1


def _take_all_but(directory: Path, spare: int) -> Path:
    """Another program fills a tmpfs, except for so many bytes."""
    hog = directory / 'hog'
    free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    with open(hog, 'wb') as file:
        os.posix_fallocate(file.fileno(), 0, free - spare)
    return hog


@pytest.mark.thorough
def test_replacement_without_memory_reports_it_and_holds_no_replicas(
    cluster: Make, reference: Reference, limited_tmpfs: Path
) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '3', 'max_wait=0.1', nodes=4)
    job.flags += ['--sparse-ckpt-dir', str(limited_tmpfs)]
    node = limited_tmpfs / job.name / 'node1'
    hogs: list[Path] = []

    def another_node(rank: int, nodes: object) -> None:
        """The replacement finds no memory at first, later enough for its own windows."""
        if hogs:
            hogs.pop().unlink()
            _take_all_but(limited_tmpfs, another_node.needed)
            return
        replicas = sum(file.stat().st_size for file in node.glob('1/[!1]/*.window'))
        assert replicas
        free = os.statvfs(limited_tmpfs).f_bavail
        shutil.rmtree(node)
        freed = (os.statvfs(limited_tmpfs).f_bavail - free) * os.statvfs(limited_tmpfs).f_frsize
        another_node.needed = freed - replicas // 2
        hogs.append(_take_all_but(limited_tmpfs, 1 << 16))

    job._wipe = another_node
    assert job.survive(fail_at='1:9:forward') == {1: 2}
    assert differences(reference(*BASE), read_digest(job)) == []
    output = job.output(attempt=0)
    assert 'mount a larger tmpfs' in output and 'AssertionError' not in output
    reasons = [event.reason for event in job.events_of(ProtectionReduced, rank=1)]
    assert any('holds no replicas for others' in reason for reason in reasons)


def test_unreadable_dense_checkpoint_does_not_count_as_finished(
    cluster: Make, tmp_path: Path
) -> None:
    (tmp_path / 'latest_checkpointed_iteration.txt').write_text('ten')
    job = cluster(*BASE, '--load', str(tmp_path), ranks=1, nodes=1)
    job.flags += ['--pipeline-model-parallel-size', '1', '--expert-model-parallel-size', '1']
    assert job.run() == [EXIT_USER_ERROR]
    _said_in_one_line(job, 'instead of loading the dense checkpoint of --load; its own message')
    assert 'ERROR: Invalid metadata file' in job.output(attempt=0)


@pytest.mark.parametrize('trouble', with_quick(UNREADABLE, 'an empty tracker file'))
def test_unreadable_dense_tier_does_not_end_a_job_with_windows(
    trouble: str, cluster: Make, reference: Reference, tmp_path: Path
) -> None:
    dense = tmp_path / 'dense'
    flags = ['--save', str(dense), '--load', str(dense), '--save-interval', '4']
    flags += ['--use-checkpoint-args']
    job = cluster(*TWO_STAGES, *flags, '--sparse-ckpt-window', '6', *SETTLED, ranks=2)
    assert -9 in job.run(fail_at='1:11:forward', mutation=PERSISTED)
    UNREADABLE[trouble](dense)
    job.flags += ['--exit-on-missing-checkpoint']
    job.finish()
    assert differences(reference(*TWO_STAGES, ranks=2), read_digest(job)) == []
    assert job.events_of(Recovered)
