# SPDX-License-Identifier: Apache-2.0
"""Ends of a job without a failure: remaining host memory, and messages."""

from pathlib import Path

import pytest

from moevement_ext.events import Recovered
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.judged import judged
from tests.distributed.harness.local_cluster import launch
from tests.distributed.test_whole_job_recovery import BASE

pytestmark = [pytest.mark.timeout(400), pytest.mark.thorough]

WINDOW = ['--sparse-ckpt-window', '2']


def said(job: Cluster) -> str:
    (line,) = (line for line in job.output(0).splitlines() if ' sparse ckpt | exit at' in line)
    return line


def test_exit_request_survives_a_death_in_the_save_before_it(cluster: Make, tmp_path: Path) -> None:
    dense = tmp_path / 'dense'
    saves = ['--save', str(dense), '--save-interval', '100']
    job = cluster(*BASE, *WINDOW, *saves, '--exit-interval', '6')
    assert job.survive(fail_at='1:6:saved') == {1: 1}
    assert 'exiting program at iteration 6' in job.output(0)
    assert 'iteration        7/' not in job.output(0)
    assert (dense / 'latest_checkpointed_iteration.txt').read_text() == '6'
    assert not job.memory.exists()


def test_repeated_evaluation_may_hit_the_time_limit(
    cluster: Make, reference: Reference, tmp_path: Path
) -> None:
    """Upstream leaves it in the middle, with the model as it is in evaluations, and then exits."""
    flags = [*BASE, *'--eval-interval 4 --eval-iters 2 --hidden-dropout 0.1'.split()]
    dense = ['--save', str(tmp_path / 'dense'), '--load', str(tmp_path / 'dense')]
    job = cluster(*flags, *WINDOW, *dense, '--save-interval', '100')
    job.flags += ['--exit-duration-in-mins', '60']
    until_then = 'mutations.ending:an_hour_passes_until_a_new_worker_evaluates'
    assert job.survive(fail_at='1:8:evaluate', mutation=until_then) == {1: 1}
    assert 'exit at iteration: 9 ' in said(job)
    del job.flags[-2:]
    job.finish()
    assert differences(reference(*flags), read_digest(job)) == []


def test_job_that_ran_an_iteration_twice_recovers_the_whole_job(
    cluster: Make, reference: Reference
) -> None:
    """Upstream repeats an iteration of large gradients; a stage replaying alone could not."""
    checked = '--check-for-large-grads'
    job = cluster(*BASE, '--sparse-ckpt-window', '3', checked)
    mutation = 'mutations.ending:large_gradients_in_iteration_8'
    assert job.survive(fail_at='3:9:forward', mutation=mutation)[3] == 1
    assert 'Need to rerun step' in job.output(0)
    (reason,) = judged(job).whole_job
    assert reason.startswith(f'{checked} without --rerun-mode disabled: ')
    assert f'restarts the whole job: {reason}' in job.output(0)
    assert differences(reference(*BASE), read_digest(job)) == []


# Under the launcher itself

TWO_STAGES = (
    '--bf16 --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --train-iters 8'
).split()


def test_plain_program_restarts_as_a_whole(cluster: Make, reference: Reference) -> None:
    job = cluster(*TWO_STAGES, sparse=False, ranks=2)
    code, output = launch(job, '--kill', '0@4')
    assert code == 0, output[-5000:]
    assert '] all workers start again, since rank 0' in output
    assert differences(reference(*TWO_STAGES, ranks=2), read_digest(job)) == []


def test_rerun_machine_exit_keeps_the_windows(cluster: Make, reference: Reference) -> None:
    """It asks for the job to be started elsewhere, by an exit status that is passed on."""
    job = cluster(*TWO_STAGES, *WINDOW, ranks=2)
    code, output = launch(job, mutation='ending.result_refused_in_iteration_6')
    assert code == 17, output[-5000:]
    assert f'exit at iteration: 5 | windows: kept in {job.memory} |' in output
    assert f'] windows of this run stay in {job.memory}: launch the same job' in output
    assert 'start again' not in output
    code, output = launch(job)
    assert code == 0, output[-5000:]
    assert job.events_of(Recovered)[0].iteration == 5
    assert differences(reference(*TWO_STAGES, ranks=2), read_digest(job)) == []
    assert not job.memory.exists()


def test_rerun_machine_state_is_resumed_from_the_dense_checkpoint(
    cluster: Make, tmp_path: Path
) -> None:
    """It is in the dense checkpoint alone: windows of the same iteration would be taken first."""
    dense = tmp_path / 'dense'
    saves = f'--save {dense} --load {dense} --save-interval 100'.split()
    job = cluster(*TWO_STAGES, *WINDOW, *saves, ranks=2)
    code, output = launch(job, mutation='ending.result_refused_in_iteration_6_again')
    assert code == 16, output[-5000:]
    assert f'exit at iteration: 5 | windows: removed | go on: --load {dense} |' in output
    code, output = launch(job)
    assert 'Getting RerunStateMachine state from checkpoint. Will rerun step.' in output
    assert code == 16, 'it is on the same machine again'
