# SPDX-License-Identifier: Apache-2.0
"""Ends of a job that no failure brings about: what is left in host memory, and what is said."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.cluster import Cluster
from tests.distributed.conftest import differences, read_digest

pytestmark = pytest.mark.timeout(400)

FLAGS = (
    '--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2 '
    '--expert-model-parallel-size 2 --untie-embeddings-and-output-weights --train-iters 12'
).split()
WINDOW = ['--sparse-ckpt-window', '2']

# Flags; what happens to the workers.
PLANNED = {
    'exit interval': (['--exit-interval', '6'], None),
    'exit duration': (['--exit-duration-in-mins', '60'], 'trained_for_an_hour'),
    'exit signal': (['--exit-signal-handler'], 'terminated_in_iteration_6'),
}


def said(job: Cluster) -> str:
    (line,) = (line for line in job.output(0).splitlines() if ' sparse ckpt | exit at' in line)
    return line


def end_as_planned(job: Cluster, flags: list[str], mutation: str | None) -> None:
    job.flags += flags
    place = mutation and f'ending_mutations:{mutation}'
    assert job.survive(mutation=place) == {}
    del job.flags[len(job.flags) - len(flags) :]


@pytest.mark.parametrize('end', PLANNED)
def test_nothing_is_left_in_memory_where_a_dense_checkpoint_has_it_all(
    end: str, cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    dense = str(tmp_path / 'dense')
    job = cluster(*FLAGS, *WINDOW, '--save', dense, '--save-interval', '100')
    end_as_planned(job, *PLANNED[end])
    assert said(job).endswith(f'| windows: removed | go on: --load {dense} |')
    assert not job.memory.exists()


@pytest.mark.parametrize('end', PLANNED)
def test_windows_are_kept_where_nothing_else_has_the_state(
    end: str, cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    job = cluster(*FLAGS, *WINDOW)
    end_as_planned(job, *PLANNED[end])
    assert f'| windows: kept in {job.memory} | go on: launch the job again' in said(job)
    assert job.memory.exists()
    assert job.survive() == {}
    (recovered,) = job.events('recovered')
    assert recovered['iteration'] == (1 if end == 'exit duration' else 6)
    assert differences(reference(*FLAGS), read_digest(job)) == []
    assert not job.memory.exists()
