# SPDX-License-Identifier: Apache-2.0
"""Windows of a run that is gone become a checkpoint of upstream: by ranks, or by one process."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from moevement_ext.events import RecoveryStarted, WindowOnDisk
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import ROOT, Cluster
from tests.distributed.harness.damage import flip_byte
from tests.distributed.harness.setups import BF16, EP2, PP2, UNTIED, setups
from tests.distributed.probes.checkpoints import SAID
from tools.windows.__main__ import main

MODEL = '--bf16 --use-distributed-optimizer --untie-embeddings-and-output-weights --train-iters 14'
ONE_STAGE = MODEL.split()
TWO_STAGES = [*ONE_STAGE, '--pipeline-model-parallel-size', '2']
WINDOW_OF_3 = ['--sparse-ckpt-window', '3']

pytestmark = [pytest.mark.timeout(1200), pytest.mark.thorough]


def relaunched(job: Cluster, directory: Path, dense: Path) -> None:
    launcher = ['-m', 'moevement_ext.launch.command_line']
    command = [sys.executable, *launcher, '--nodes', '2', '--']
    command += [str(ROOT / 'pretrain_gpt.py'), *job.flags]
    windows = ['export', str(directory), '--to', 'torch_dist', '--output', str(dense)]
    assert main([*windows, '--', *command]) == 0


def loss_after(iteration: int, output: str) -> float:
    (found,) = re.findall(rf'iteration +{iteration}/.*?lm loss: (\S+)', output)
    return float(found)


@pytest.mark.parametrize('tier', ['memory', 'disk'])
def test_any_layout_resumes_from_an_export(
    tier: str,
    cluster: Make,
    reference: Reference,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    dense, disk = tmp_path / 'dense', tmp_path / 'disk'
    disk.mkdir()
    to_disk = ['--sparse-ckpt-disk', str(disk), '--sparse-ckpt-disk-every', '1']
    extra = to_disk if tier == 'disk' else []
    job = cluster(*TWO_STAGES, *WINDOW_OF_3, *extra, ranks=2)
    assert -9 in job.run(fail_at='1:11:forward')
    if tier == 'disk':
        assert job.events_of(WindowOnDisk)
        shutil.rmtree(job.memory)
    relaunched(job, disk if tier == 'disk' else job.memory, dense)
    (begun,) = job.events_of(RecoveryStarted)
    assert begun.source == ('disk' if tier == 'disk' else 'own memory')
    first = begun.dense_at + 1
    assert f'iteration {first} is in {dense}' in capfd.readouterr().out
    assert job.memory.exists() == (tier == 'memory')  # what was read stays
    assert any(disk.iterdir()) == (tier == 'disk')

    same = cluster(*TWO_STAGES, '--load', str(dense), sparse=False, ranks=2)
    same.finish(timeout_s=400.0)
    other = cluster(*ONE_STAGE, '--load', str(dense), sparse=False, ranks=1)
    other.finish(timeout_s=400.0)
    for one in (same, other):
        assert f'iteration        {first}/' not in one.output(0)
    assert differences(reference(*TWO_STAGES, ranks=2), read_digest(same)) == []
    losses = [loss_after(14, one.output(0)) for one in (same, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


SHARDED = f'{BF16} {UNTIED} --train-iters 14'
STAGES = f'{SHARDED} {PP2}'
OF_EXPERTS = f'{STAGES} {EP2}'.split()
LAYOUTS = setups('export-offline', SHARDED=SHARDED, STAGES=STAGES)
EVERY_ITERATION = '--sparse-ckpt-window 1 max_wait=60'.split()
RESHARDABLE = '--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable'.split()


def lost(make: Make, flags: list[str], ranks: int, *extra: str) -> Cluster:
    """A job that is gone, with a window of each of its last iterations in host memory."""
    job = make(*flags, *EVERY_ITERATION, *extra, ranks=ranks)
    assert -9 in job.run(fail_at=f'{ranks - 1}:8:forward')
    return job


def exported(
    make: Make, job: Cluster, output: Path, *flags: str, mutation: str | None = None
) -> str:
    tool = make(sparse=False, ranks=1, nodes=1)
    tool.program = 'tools.windows.__main__'
    windows = ['export', str(job.memory), '--offline', '--to', 'torch_dist']
    tool.flags = [*windows, '--output', str(output), '--', *job.flags, *flags]
    tool.finish(mutation=mutation)
    return tool.output(0)


def iteration_of(said: str) -> int:
    (found,) = re.findall(r': iteration (\d+) is in ', said)
    return int(found)


def saved(make: Make, flags: list[str], ranks: int, iteration: int, folder: Path) -> Path:
    """What plain Megatron saves at an iteration of an undisturbed run."""
    until = ['--save-interval', str(iteration), '--exit-interval', str(iteration)]
    make(*flags, *RESHARDABLE, *until, '--save', str(folder), sparse=False, ranks=ranks).finish()
    return folder


def differing(make: Make, iteration: int, *folders: Path) -> list[str]:
    """Names of all that differs between two checkpoints."""
    tool = make(sparse=False, ranks=1, nodes=1)
    tool.program = 'tests.distributed.probes.checkpoints'
    tool.flags = [str(folder / f'iter_{iteration:07d}') for folder in folders]
    tool.finish()
    (line,) = re.findall(rf'^{SAID}(.*)$', tool.output(0), re.MULTILINE)
    found: list[str] = json.loads(line)
    return found


def digest_of(make: Make, flags: list[str], ranks: int, load: Path) -> dict:
    """The end of a job of plain Megatron that begins with a checkpoint."""
    job = make(*flags, '--load', str(load), sparse=False, ranks=ranks)
    job.finish()
    return read_digest(job)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_export_equals_a_checkpoint_saved_by_the_job(
    layout: str, cluster: Make, tmp_path: Path
) -> None:
    flags, ranks = LAYOUTS[layout]['flags'].split(), LAYOUTS[layout]['ranks']
    iteration = iteration_of(exported(cluster, lost(cluster, flags, ranks), tmp_path / 'dense'))
    plain = saved(cluster, flags, ranks, iteration, tmp_path / 'plain')
    assert differing(cluster, iteration, tmp_path / 'dense', plain) == []


@pytest.mark.parametrize(
    ('flags', 'ranks'),
    [(OF_EXPERTS, 4), (f'{SHARDED} {EP2}'.split(), 2)],
    ids=['same', 'other'],
)
def test_other_layouts_resume_as_from_a_checkpoint_saved_by_the_job(
    flags: list[str], ranks: int, cluster: Make, tmp_path: Path
) -> None:
    """Also with the random numbers that upstream gives each rank."""
    dense, plain = tmp_path / 'dense', tmp_path / 'plain'
    iteration = iteration_of(exported(cluster, lost(cluster, OF_EXPERTS, 4), dense))
    saved(cluster, OF_EXPERTS, 4, iteration, plain)
    ends = [digest_of(cluster, flags, ranks, folder) for folder in (dense, plain)]
    assert differences(*ends) == []


def test_job_without_expert_parallelism_resumes_if_flags_allow(
    cluster: Make, tmp_path: Path
) -> None:
    """Upstream does not load what a job with parallel experts saves in one without."""
    job = lost(cluster, OF_EXPERTS, 4)
    said = exported(cluster, job, tmp_path / 'dense', '--expert-model-parallel-size', '1')
    alone = cluster(*SHARDED.split(), '--load', str(tmp_path / 'dense'), sparse=False, ranks=1)
    alone.finish()
    first = iteration_of(said) + 1
    assert re.findall(r'iteration +(\d+)/', alone.output(0))[0] == str(first)
    assert read_digest(alone)['iteration'] == 14


@pytest.mark.mutation
@pytest.mark.parametrize(
    ('mutation', 'layout'),
    [
        ('experts_swapped', 'stages-of-experts'),
        ('generators_of_the_first_stage', 'stages-of-experts'),
        ('halves_not_interleaved', 'tensor-parallel'),
    ],
)
def test_wrong_export_changes_the_bits(
    mutation: str, layout: str, cluster: Make, tmp_path: Path
) -> None:
    flags, ranks = LAYOUTS[layout]['flags'].split(), LAYOUTS[layout]['ranks']
    job = lost(cluster, flags, ranks)
    wrong = exported(cluster, job, tmp_path / 'wrong', mutation=f'mutations.offline:{mutation}')
    iteration = iteration_of(wrong)
    right = exported(cluster, job, tmp_path / 'right')
    assert iteration_of(right) == iteration
    assert differing(cluster, iteration, tmp_path / 'wrong', tmp_path / 'right') != []


def test_damaged_record_is_read_from_a_replica_or_named(cluster: Make, tmp_path: Path) -> None:
    job = lost(cluster, STAGES.split(), 2)
    iteration = iteration_of(exported(cluster, job, tmp_path / 'whole'))
    names = f'window-{iteration}-*.window'
    own, replica = sorted(job.memory.rglob(f'*/0/{names}'), key=lambda path: path.parts[-3])
    flip_byte(own, own.stat().st_size // 2)  # of masters and moments
    assert iteration_of(exported(cluster, job, tmp_path / 'replica')) == iteration
    assert differing(cluster, iteration, tmp_path / 'whole', tmp_path / 'replica') == []
    flip_byte(replica, replica.stat().st_size // 2)
    said = exported(cluster, job, tmp_path / 'nothing')
    assert 'checksum mismatch in operator' in said and str(own) in said and str(replica) in said
    assert 'Traceback' not in said and not (tmp_path / 'nothing').exists()
