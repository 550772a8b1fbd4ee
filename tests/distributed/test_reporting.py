# SPDX-License-Identifier: Apache-2.0
"""Reports of a run: its log lines and upstream's, TensorBoard, events, checkpoints, evaluation."""

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from moevement_ext.events import RecoveryStarted
from tests.distributed.conftest import Make, differences, read_digest
from tests.distributed.harness import wandb_stand_in
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.faults import PERSISTED, SETTLED
from tests.distributed.harness.output import upstream_lines
from tools.lab.history import read_history, shares
from tools.report.__main__ import render
from tools.simulate.profile import derive

RANKS = 2
ITERATIONS = 12
LOG_INTERVAL = 2
FLAGS = (
    '--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2 '
    f'--untie-embeddings-and-output-weights --num-layers 2 --train-iters {ITERATIONS} '
    f'--log-interval {LOG_INTERVAL} --eval-interval 4 --eval-iters 2 --global-batch-size 4'
).split()
WINDOW = ['--sparse-ckpt-window', '3', *SETTLED]
OURS = re.compile(
    r' sparse ckpt \| window: 3 \| slot bytes: \d+ \| exposed \(ms\): \d+\.\d'
    r' \| persisted: (none|\d+) \| skipped windows: 0'
    r' \| protection reduced: 0 \| recoveries: 0 \|'
)
RECOVERY_PHASES = ('find', 'obtain', 'load', 'convert', 'catch_up')


def saving(directory: Path) -> list[str]:
    return [
        *('--tensorboard-dir', str(directory / 'tensorboard')),
        *('--save', str(directory / 'dense'), '--save-interval', str(ITERATIONS)),
    ]


@pytest.fixture(scope='module')
def plain_jobs() -> list[Cluster]:
    """The run of `fault_free`, once there is one."""
    return []


@pytest.fixture
def fault_free(cluster: Make, plain_jobs: list[Cluster]) -> Cluster:
    if not plain_jobs:
        job = cluster(*FLAGS, sparse=False, ranks=RANKS)
        job.flags += saving(job.directory)
        job.finish()
        plain_jobs.append(job)
    return plain_jobs[0]


def test_upstream_output_and_checkpoints_are_unchanged(
    cluster: Make, fault_free: Cluster, tmp_path: Path
) -> None:
    job = cluster(*FLAGS, *saving(tmp_path / 'sparse'), *WINDOW, ranks=RANKS)
    job.finish()
    assert upstream_lines(job, attempt=0) == upstream_lines(fault_free, attempt=0)
    check_our_lines(job)
    check_scalars(fault_free.directory / 'tensorboard', tmp_path / 'sparse' / 'tensorboard')
    dense = files(tmp_path / 'sparse' / 'dense')
    random_numbers = {name for name in dense if '/moevement' in name}
    assert dense - random_numbers == files(fault_free.directory / 'dense')
    assert any('/moevement/random-' in name for name in random_numbers)
    assert any(name.endswith('.distcp') for name in dense)


EVERY_ITERATION = [*FLAGS, '--log-interval', '1']  # the last of a flag counts


@pytest.mark.thorough
@pytest.mark.parametrize('mutation', ['', 'metrics_of_a_replay_are_kept'])
def test_log_lines_after_a_recovery_match_a_fault_free_run(mutation: str, cluster: Make) -> None:
    """Losses of the router, which upstream sums up until it logs them, among them."""
    plain = cluster(*EVERY_ITERATION, sparse=False, ranks=RANKS)
    plain.finish()
    expected = set(upstream_lines(plain, 0))
    job = cluster(*EVERY_ITERATION, *WINDOW, ranks=RANKS)
    broken = f'mutations.localized:{mutation}' if mutation else None
    assert job.survive(fail_at='1:10:backward', mutation=broken) == {1: 1}
    assert (set(upstream_lines(job, 0)) <= expected) is not bool(mutation)


def test_job_is_one_run_of_wandb(cluster: Make, tmp_path: Path) -> None:
    """After the loss of all workers, and after that of the last rank, which reports."""
    job = cluster(*FLAGS, *WINDOW, ranks=RANKS)
    job.flags += [*('--wandb-project', 'any', '--wandb-exp-name', 'any')]
    job.flags += ['--wandb-save-dir', str(tmp_path)]
    stand_in = 'harness.wandb_stand_in:install'
    assert -9 in job.run(fail_at='0:6:forward', mutation=stand_in)
    assert job.survive(fail_at='1:10:backward', mutation=stand_in) == {1: 1}
    runs = (tmp_path / wandb_stand_in.RUNS).read_text().splitlines()
    assert len(runs) == 3 and len({*runs}) == 1 and runs[0].endswith(' allow')
    assert not [*tmp_path.glob('*.id')], 'it has finished'


def check_our_lines(job: Cluster) -> None:
    """One line after each of upstream's but that of the first iteration, on the last rank only."""
    last = job.log(RANKS - 1).with_name(f'attempt0-rank{RANKS - 1}.log').read_text().splitlines()
    ours = [line for line in last if line.startswith(' sparse ckpt | window:')]
    assert len(ours) == ITERATIONS // LOG_INTERVAL
    assert all(OURS.fullmatch(line) for line in ours), ours
    assert [OURS.fullmatch(line)[1] for line in ours][-1] != 'none'  # type: ignore[index]
    assert job.output(0).count(' sparse ckpt | window:') == len(ours)
    order = re.findall(r'^ \[.*\] (iteration) |^ sparse ckpt \| (window):', '\n'.join(last), re.M)
    assert [''.join(kind) for kind in order] == ['iteration', *['iteration', 'window'] * len(ours)]


def check_scalars(plain: Path, sparse: Path) -> None:
    theirs, all_scalars = scalars(plain), scalars(sparse)
    ours = {tag: v for tag, v in all_scalars.items() if tag.startswith('sparse-ckpt/')}
    names = (
        'window',
        'slot-bytes',
        'exposed-ms',
        'skipped-windows',
        'protection-reduced',
        'recoveries',
        'persisted',
    )
    assert ours.keys() == {f'sparse-ckpt/{name}' for name in names}
    logged = list(range(LOG_INTERVAL, ITERATIONS + 1, LOG_INTERVAL))
    assert ours['sparse-ckpt/window'] == [(step, 3.0) for step in logged]
    assert [step for step, _ in ours['sparse-ckpt/exposed-ms']] == logged
    assert all(value > 0 for _, value in ours['sparse-ckpt/slot-bytes'])
    assert theirs.keys() == all_scalars.keys() - ours.keys()
    assert all_scalars['lm loss'] == theirs['lm loss'] != []


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()['scalars']
    }


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob('*')}


def validation_losses(job: Cluster, attempt: int) -> dict[str, str]:
    found = re.findall(r'validation loss at (iteration \d+) \|(.*)', job.output(attempt))
    return dict(found)


def test_recovered_run_reports_and_evaluates_like_the_fault_free_one(
    cluster: Make, fault_free: Cluster, tmp_path: Path
) -> None:
    """TensorBoard has each iteration once."""
    job = cluster(*FLAGS, *WINDOW, '--tensorboard-dir', str(tmp_path), ranks=RANKS)
    job.flags += ['--tensorboard-queue-size', '1']  # else SIGKILL takes all points along
    assert -9 in job.run(fail_at='1:10:backward', mutation=PERSISTED)
    logged = [step for step, _ in scalars(tmp_path)['lm loss']]
    job.finish()
    assert len([*tmp_path.iterdir()]) > 1
    resumed = job.events_of(RecoveryStarted)[0].dense_at
    assert max(logged) > resumed, 'some iterations are computed again'
    assert [step for step, _ in scalars(tmp_path)['lm loss']] == [*range(1, ITERATIONS + 1)]
    assert differences(read_digest(fault_free), read_digest(job)) == []
    expected = validation_losses(fault_free, 0)
    assert expected.keys() == {'iteration 4', 'iteration 8', 'iteration 12'}
    before, after = validation_losses(job, 0), validation_losses(job, 1)
    assert before == {key: expected[key] for key in ('iteration 4', 'iteration 8')}
    assert after and after.items() <= expected.items()
    lines = upstream_lines(fault_free, 0)
    assert [line for line in upstream_lines(job, 1) if line in lines]
    for rank in range(RANKS):
        check_events(job.events(rank=rank), rank)
    check_tools(job.directory / 'events')


def check_events(events: list[dict], rank: int) -> None:
    for event in events:
        assert isinstance(event['time'], float)
        assert event['rank'] == rank
        assert 0 <= event['iteration'] <= ITERATIONS
    assert [event['time'] for event in events] == sorted(event['time'] for event in events)
    first, second = (event['pid'] for event in events if event['event'] == 'worker_started')
    assert {event['pid'] for event in events} == {first, second}
    before = [event['event'] for event in events if event['pid'] == first]
    assert before[0] == 'worker_started' and 'window_persisted' in before
    assert not {'failure_detected', 'recovered', 'finished'} & set(before)
    check_recovery([event for event in events if event['pid'] == second])


def check_recovery(events: list[dict]) -> None:
    """The events of the second attempt, in the order in which a recovery goes."""
    names = ['worker_started', 'failure_detected', 'recovery_started', 'recovered', 'finished']
    assert [event['event'] for event in events if event['event'] in names] == names
    by_name = {event['event']: event for event in events}
    detected, started = by_name['failure_detected'], by_name['recovery_started']
    recovered = by_name['recovered']
    assert detected['committed'] >= 8 and detected['windows'] >= 1
    assert started['dense_at'] == started['start'] + 2
    newest = max(detected['committed'], started['dense_at'])
    assert recovered['replayed'] == newest - started['start']
    assert tuple(recovered['seconds']) == RECOVERY_PHASES
    assert all(seconds >= 0 for seconds in recovered['seconds'].values())
    assert recovered['seconds']['convert'] > 0


def check_tools(events: Path) -> None:
    """What the tools read out of the events of a real run."""
    history = read_history(events)
    [episode] = history.episodes
    assert (episode.scope, episode.replaced) == ('whole job', [0, 1])
    assert (history.finished, history.iteration) == (True, ITERATIONS)
    assert history.of_iterations == f'{ITERATIONS} of {ITERATIONS}' and history.losses
    assert [place.stage for _, place in sorted(history.places.items())] == [0, 1]
    time = shares(history)
    assert time is not None and 0 < time.ettr < 1
    assert f'{time.ettr:.1%}' in render(history, 'run')
    profile = derive(events, {'network_bytes_per_s': 1e9})  # one node holds no replicas
    assert profile.pipeline.stages == 2 and profile.iteration_s > 0
    assert profile.mtbf_s == history.mtbf_s is not None
    assert 0 < profile.restart_s < time.recovering
