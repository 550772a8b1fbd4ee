# SPDX-License-Identifier: Apache-2.0
"""One process makes upstream's checkpoint from windows of several ranks that are gone."""

import json
import re
from pathlib import Path

import pytest

from tests.distributed.conftest import Make, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.damage import flip_byte
from tests.distributed.probes.checkpoints import SAID

pytestmark = [pytest.mark.timeout(1200), pytest.mark.thorough]

UNTIED = '--bf16 --untie-embeddings-and-output-weights --train-iters 14'.split()
SHARDED = [*UNTIED, '--use-distributed-optimizer']
STAGES = [*SHARDED, '--pipeline-model-parallel-size', '2']
STAGES_OF_EXPERTS = [*STAGES, '--expert-model-parallel-size', '2']
EVERY_ITERATION = '--sparse-ckpt-window 1 max_wait=60'.split()
RESHARDABLE = '--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable'.split()

LAYOUTS = {
    'stages-of-experts': (STAGES_OF_EXPERTS, 4),
    'tensor-parallel': (
        [*SHARDED, *'--tensor-model-parallel-size 2 --sequence-parallel'.split()],
        2,
    ),
    'experts-in-one-piece': (
        [
            *STAGES_OF_EXPERTS[:-2],
            *'--tensor-model-parallel-size 2 --sequence-parallel'.split(),
            *'--expert-tensor-parallel-size 1 --expert-model-parallel-size 2'.split(),
        ],
        4,
    ),
    'interleaved-tied-replicated': (
        [
            *'--bf16 --train-iters 14 --pipeline-model-parallel-size 2'.split(),
            *'--num-layers-per-virtual-pipeline-stage 1'.split(),
        ],
        4,
    ),
    'full-precision': (['--train-iters', '14', '--use-distributed-optimizer'], 2),
}
"""Flags and ranks."""


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
    flags, ranks = LAYOUTS[layout]
    iteration = iteration_of(exported(cluster, lost(cluster, flags, ranks), tmp_path / 'dense'))
    plain = saved(cluster, flags, ranks, iteration, tmp_path / 'plain')
    assert differing(cluster, iteration, tmp_path / 'dense', plain) == []


@pytest.mark.parametrize(
    ('flags', 'ranks'),
    [(STAGES_OF_EXPERTS, 4), ([*SHARDED, '--expert-model-parallel-size', '2'], 2)],
    ids=['same', 'other'],
)
def test_other_layouts_resume_as_from_a_checkpoint_saved_by_the_job(
    flags: list[str], ranks: int, cluster: Make, tmp_path: Path
) -> None:
    """Also with the random numbers that upstream gives each rank."""
    dense, plain = tmp_path / 'dense', tmp_path / 'plain'
    iteration = iteration_of(exported(cluster, lost(cluster, STAGES_OF_EXPERTS, 4), dense))
    saved(cluster, STAGES_OF_EXPERTS, 4, iteration, plain)
    ends = [digest_of(cluster, flags, ranks, folder) for folder in (dense, plain)]
    assert differences(*ends) == []


def test_job_without_expert_parallelism_resumes_if_flags_allow(
    cluster: Make, tmp_path: Path
) -> None:
    """Upstream does not load what a job with parallel experts saves in one without."""
    job = lost(cluster, STAGES_OF_EXPERTS, 4)
    said = exported(cluster, job, tmp_path / 'dense', '--expert-model-parallel-size', '1')
    alone = cluster(*SHARDED, '--load', str(tmp_path / 'dense'), sparse=False, ranks=1)
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
    flags, ranks = LAYOUTS[layout]
    job = lost(cluster, flags, ranks)
    wrong = exported(cluster, job, tmp_path / 'wrong', mutation=f'mutations.offline:{mutation}')
    iteration = iteration_of(wrong)
    right = exported(cluster, job, tmp_path / 'right')
    assert iteration_of(right) == iteration
    assert differing(cluster, iteration, tmp_path / 'wrong', tmp_path / 'right') != []


def test_damaged_record_is_read_from_a_replica_or_named(cluster: Make, tmp_path: Path) -> None:
    job = lost(cluster, STAGES, 2)
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
