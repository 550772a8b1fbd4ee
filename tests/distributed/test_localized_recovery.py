# SPDX-License-Identifier: Apache-2.0
"""SIGKILLs of single workers: only their stage replays, with the bits of a fault-free run."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron.core.dist_checkpointing import load_common_state_dict

from moevement_ext.events import FailureDetected, NextTier, Recovered, WindowPersisted
from tests.distributed.conftest import ON_BOTH_BACKENDS, differences, read_digest
from tests.distributed.harness.cluster import NCCL_LIKE, Cluster
from tests.distributed.harness.faults import SEALED
from tests.quick import with_quick

pytestmark = ON_BOTH_BACKENDS

BF16 = '--bf16 --use-distributed-optimizer'
UNTIED = '--untie-embeddings-and-output-weights'
ITERATIONS = '--train-iters 12'
LONG = ['--train-iters', '30']
"""For faults from outside once a window is persisted: they must not come too late."""
PP_EP = '--pipeline-model-parallel-size 2 --expert-model-parallel-size 2'
PP4 = f'{BF16} --pipeline-model-parallel-size 4 {UNTIED}'
BASE = f'{BF16} {PP_EP} {UNTIED}'

# Flags; window; where a worker dies.
LAYOUTS = {
    'pp2-ep2-first-stage': (BASE, 3, '1:8:forward'),
    'pp2-ep2-last-stage-window-1': (BASE, 1, '2:8:forward'),
    'pp2-ep2-window-5': (BASE, 5, '3:11:backward'),
    'pp4-middle-stage': (PP4, 3, '1:9:forward'),
    'pp4-tied-first-stage': (f'{BF16} --pipeline-model-parallel-size 4', 3, '0:9:backward'),
    'pp3-six-layers': (
        f'{BF16} --pipeline-model-parallel-size 3 --num-layers 6 {UNTIED}', 3, '1:9:backward',
    ),
    'pp2-dp2-distributed': (f'{BF16} --pipeline-model-parallel-size 2 {UNTIED}', 3, '3:9:reduce'),
    'pp2-dp2-plain': (f'--bf16 --pipeline-model-parallel-size 2 {UNTIED}', 3, '1:9:backward'),
    'pp2-dp2-fp32-tied': ('--pipeline-model-parallel-size 2', 3, '2:9:forward'),
    'pp2-dp2-plain-both-peers': (
        f'--bf16 --pipeline-model-parallel-size 2 {UNTIED}', 3, '0:9:forward,1:9:forward',
    ),
    'pp2-tp2-sequence-parallel': (
        f'{BF16} --tensor-model-parallel-size 2 --sequence-parallel '
        f'--pipeline-model-parallel-size 2 {UNTIED}', 3, '1:8:forward',
    ),
    'interleaved': (f'{BASE} --num-layers-per-virtual-pipeline-stage 1', 3, '0:8:forward'),
    'interleaved-overlapped-warmup': (
        f'{BASE} --num-layers-per-virtual-pipeline-stage 1 '
        '--overlap-p2p-communication-warmup-flush', 3, '2:9:backward',
    ),
    'per-token-loss': (f'{BASE} --calculate-per-token-loss', 3, '0:9:backward'),
    'router-bias': (
        f'{BASE} --moe-router-enable-expert-bias --moe-router-score-function sigmoid '
        '--moe-router-bias-update-rate 1e-2', 3, '1:9:backward',
    ),
    'fp16-skipped-steps': (
        '--fp16 --initial-loss-scale 2048 --loss-scale-window 2 --hysteresis 1 '
        f'--use-distributed-optimizer {PP_EP} {UNTIED} --calculate-per-token-loss '
        '--global-batch-size 8', 4, '1:9:forward',
    ),
    'fp16-hysteresis-skips-on-both-sides': (  # as in `test_whole_job_recovery`
        '--fp16 --initial-loss-scale 2048 --loss-scale-window 2 --hysteresis 2 '
        f'--min-loss-scale 2048 --use-distributed-optimizer {PP_EP} {UNTIED} '
        '--calculate-per-token-loss --global-batch-size 8', 2, '1:6:forward',
    ),
    'before-the-first-update': (  # the first iterations overflow
        '--fp16 --initial-loss-scale 4194304 --hysteresis 1 '
        f'--use-distributed-optimizer {PP_EP} {UNTIED}', 2, '1:5:forward',
    ),
    'overlapped-reductions': (
        f'{BF16} --pipeline-model-parallel-size 2 {UNTIED} --overlap-grad-reduce '
        '--overlap-param-gather', 3, '1:8:step',
    ),
    'one-stage-ep2': (f'{BF16} --expert-model-parallel-size 2 {UNTIED}', 3, '1:8:step'),
}  # fmt: skip

PHASES = {
    'in p2p': '1:8:p2p',
    'in gradient reduction': '2:9:reduce',
    'between norm and step': '3:9:norm',
    'in the middle of the step': '0:9:step',
    'after the step': '1:8:after-step',
    'while capturing': '1:8:capture',
    'while replicating': '2:8:replicate',
}

# One worker, then more trouble: in PP 4 with windows of 3, seen from a kill in iteration 10 the
# window of iterations 6 to 8 is loaded (in 9 it may not be sealed yet), and 9 follows; from a kill
# in 8, that of 3 to 5, and 6 and 7 follow.
MORE_FAILURES = {
    'during detection': '1:9:forward,3:9:detect',
    'during regrouping': '1:9:forward,2:9:regroup',
    'when a stage has caught up': '1:8:forward,2:8:regroup',
    'when a stage has caught up and is connected': '1:8:forward,2:8:resume',
    'replacement dies when it has caught up': '1:8:forward,1:7:replayed:1',
    'replacement dies fetching': '1:10:forward,1:7:fetch:1',
    'replacement dies loading': '1:10:forward,1:8:load:1',
    'replacement dies converting': '1:10:forward,1:8:convert:1',
    'replacement dies twice catching up': '1:8:forward,1:6:catch-up:1,1:7:catch-up:2',
    'same rank right after recovery': '1:9:forward,1:9:forward:1',
    'neighbour right after recovery': '1:9:forward,2:9:backward',
    'two adjacent stages at once': '1:9:forward,2:9:forward',
    'two separate stages at once': '0:9:forward,2:9:forward',
}
EVALUATION_AND_SAVE = 'evaluate', 'evaluate-forward', 'evaluated', 'save', 'saved'


def flags_of(setup: str) -> list[str]:
    return f'{setup} {ITERATIONS}'.split()


def victims(fail_at: str) -> dict[int, int]:
    """How often each rank dies."""
    found: dict[int, int] = {}
    for fault in fail_at.split(','):
        rank = int(fault.partition(':')[0])
        found[rank] = found.get(rank, 0) + 1
    return found


def operations(dense: Path) -> float:
    """Upstream's count of floating point operations in a dense checkpoint."""
    return load_common_state_dict(str(dense))['num_floating_point_operations_so_far']


def check_localized(job: Cluster) -> None:
    """No survivor was started again, and no rank fell back to a lower tier."""
    for rank in range(job.ranks):
        assert job.events_of(NextTier, rank) == []
        assert all(event.scope == 'localized' for event in job.events_of(Recovered, rank))
    assert not job.memory.exists(), 'host memory is given back at a clean exit'


@pytest.mark.parametrize('name', with_quick(LAYOUTS))
def test_lost_stage_recovers_with_the_bits_of_a_fault_free_run(
    name: str, backend: str, cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    setup, window, fail_at = LAYOUTS[name]
    if backend == NCCL_LIKE and name == 'interleaved-overlapped-warmup':
        pytest.skip('over NCCL a failure restarts the whole job: docs/compatibility.md')
    flags = flags_of(setup)
    ranks = 3 if name.startswith('pp3') else 4
    job = cluster(*flags, '--sparse-ckpt-window', str(window), ranks=ranks)
    assert job.survive(fail_at=fail_at) == victims(fail_at)
    assert differences(reference(*flags, ranks=ranks), read_digest(job)) == []
    check_localized(job)


@pytest.mark.parametrize('phase', with_quick(PHASES))
def test_death_in_any_phase_of_an_iteration(
    phase: str, cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    flags = flags_of(BASE)
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    assert job.survive(fail_at=PHASES[phase]) == victims(PHASES[phase])
    assert differences(reference(*flags), read_digest(job)) == []
    check_localized(job)


@pytest.mark.parametrize('trouble', with_quick(MORE_FAILURES))
def test_further_failures_are_survived(
    trouble: str, cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    flags = flags_of(PP4)
    job = cluster(*flags, '--sparse-ckpt-window', '3', nodes=4)
    assert job.survive(fail_at=MORE_FAILURES[trouble]) == victims(MORE_FAILURES[trouble])
    assert differences(reference(*flags), read_digest(job)) == []
    check_localized(job)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ('fail_at', 'mutation', 'copied'),
    [
        ('1:9:step', 'mutations.liveness:rank_1_steps_when_the_others_have', [[1]]),
        ('0:9:forward,2:9:backward', None, [[0], [2]]),
    ],
)
def test_state_held_by_a_peer_is_copied_not_replayed(
    fail_at: str,
    mutation: str | None,
    copied: list,
    cluster: Callable[..., Cluster],
    reference: Callable[..., dict],
) -> None:
    flags = flags_of(f'--bf16 --pipeline-model-parallel-size 2 {UNTIED}')
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    assert job.survive(fail_at=fail_at, mutation=mutation) == victims(fail_at)
    assert differences(reference(*flags), read_digest(job)) == []
    recovered = job.events_of(Recovered, rank=3)
    assert [event.copied for event in recovered] == copied
    assert all(event.stages == [] for event in recovered)


@pytest.mark.thorough
def test_data_parallel_peer_may_die_in_the_next_iteration(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    flags = flags_of(BASE)
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    assert job.survive(fail_at='1:8:forward,0:9:backward') == {0: 1, 1: 1}
    assert differences(reference(*flags), read_digest(job)) == []
    check_localized(job)


@pytest.mark.thorough
@pytest.mark.parametrize('clip', ['0.5', '0'])
def test_stage_recovers_after_its_node_loses_its_memory(
    clip: str, cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    """The replicas of the last stage's windows have the losses, even if no norm is computed."""
    flags = flags_of(f'{BASE} --clip-grad {clip}')
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    lost = '2:8:forward,3:8:forward'
    assert job.survive(fail_at=lost, wipe=[1]) == victims(lost)
    assert differences(reference(*flags), read_digest(job)) == []
    check_localized(job)
    assert job.events_of(Recovered, rank=3)[0].iterations


@pytest.mark.thorough
def test_survivors_detect_a_death_without_the_launcher(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    flags = flags_of(BASE)
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    assert job.survive(fail_at='2:8:backward', announce=False) == {2: 1}
    assert differences(reference(*flags), read_digest(job)) == []
    check_localized(job)


def test_unaffected_stages_do_not_recompute(cluster: Callable[..., Cluster]) -> None:
    """Forward passes are counted: the cut-off iteration is the only one that is run twice."""
    job = cluster(*flags_of(PP4), '--sparse-ckpt-window', '3', nodes=4)
    job.survive(fail_at='1:9:forward', mutation='probes.training:count_forward_passes')
    per_iteration = 4  # micro-batches
    logs = [job.directory / f'attempt0-rank{rank}.log' for rank in range(4)]
    counts = [
        [int(found) for found in re.findall(r'^forward passes: (\d+)$', log.read_text(), re.M)]
        for log in logs
    ]
    for rank in (0, 2, 3):
        assert 12 * per_iteration <= counts[rank][0] <= 13 * per_iteration
    # 7 and 8 once more, with the window of 6 to 8; on a slow machine 4 to 8, with that of 3 to 5.
    [recovered] = job.events_of(Recovered, 1)
    assert (recovered.target, recovered.replayed) in {(8, 2), (8, 5)}
    assert counts[1] == [(recovered.replayed + 4) * per_iteration]


@pytest.mark.parametrize('phase', with_quick(EVALUATION_AND_SAVE))
def test_death_in_evaluation_or_dense_save_is_survived(
    phase: str, cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    flags = flags_of(f'{BASE} --eval-interval 4 --eval-iters 2 --hidden-dropout 0.1')
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    job.flags += ['--save', str(job.directory / 'dense'), '--save-interval', '4']
    assert job.survive(fail_at=f'1:8:{phase}') == {1: 1}
    assert differences(reference(*flags), read_digest(job)) == []
    check_localized(job)
    saved = sorted(path.name for path in (job.directory / 'dense').glob('iter_*'))
    assert saved == ['iter_0000004', 'iter_0000008', 'iter_0000012']
    assert [operations(job.directory / 'dense' / name) for name in saved] == [
        count * operations(job.directory / 'dense' / saved[0]) for count in (1, 2, 3)
    ]
    losses = re.findall(r'validation loss at iteration (\d+) ', job.output(0))
    assert {'4', '8', '12'} <= set(losses)


@pytest.mark.thorough
def test_repeated_deaths_in_evaluations_are_survived(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    flags = flags_of(f'{BASE} --eval-interval 2 --eval-iters 4 --hidden-dropout 0.1')
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    faults = '1:8:evaluate-forward,2:8:evaluate-forward,0:10:backward,3:8:evaluate-forward:1'
    assert set(job.survive(fail_at=faults)) >= {0, 1, 2}
    assert differences(reference(*flags), read_digest(job)) == []
    check_localized(job)


AFTER_A_COPY = '1:6:forward,2:11:backward,3:11:backward'


@pytest.mark.thorough
def test_copied_rank_soon_has_a_persisted_window(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    """A rank that was copied has nothing of the windows that were under way, nor a log."""
    flags = flags_of(f'--bf16 --pipeline-model-parallel-size 2 {UNTIED}')
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    under_way = 'mutations.protection:rank_1_keeps_only_its_first_window'
    assert job.survive(fail_at=AFTER_A_COPY, mutation=under_way) == victims(AFTER_A_COPY)
    assert differences(reference(*flags), read_digest(job)) == []
    check_localized(job)


@pytest.mark.mutation
@pytest.mark.thorough
def test_waiting_for_windows_of_a_copied_rank_prevents_persistence(
    cluster: Callable[..., Cluster],
) -> None:
    flags = flags_of(f'--bf16 --pipeline-model-parallel-size 2 {UNTIED}')
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    waiting = 'mutations.protection:what_rank_1_lacks_after_a_copy_is_waited_for'
    assert job.survive(fail_at='1:6:forward', mutation=waiting) == {1: 1}
    assert [event.start for event in job.events_of(WindowPersisted)] == [0]


@pytest.mark.thorough
def test_failure_while_all_stages_convert_is_survived(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    """All are lost; when all convert the window together, one dies: no state is whole yet."""
    flags = flags_of(BASE)
    job = cluster(*flags, '--sparse-ckpt-window', '5')
    lost = ','.join(f'{rank}:11:forward' for rank in range(4))
    assert job.survive(fail_at=f'{lost},1:9:convert:1')[1] >= 2
    assert differences(reference(*flags), read_digest(job)) == []


@pytest.mark.thorough
def test_stopped_worker_is_detected_and_replaced(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    flags = [*flags_of(BASE), *LONG]
    job = cluster(*flags, '--sparse-ckpt-window', '3', '--sparse-ckpt-hang-timeout', '5')
    stopped: list[int] = []

    def stop(workers: list, start: Callable) -> None:
        if not stopped and job.events_of(WindowPersisted, rank=2):
            stopped.append(workers[2].pid)
            os.kill(workers[2].pid, signal.SIGSTOP)

    assert job.survive(fault=stop) == {2: 1}
    assert differences(reference(*flags), read_digest(job)) == []
    (failure,) = job.events_of(FailureDetected, rank=0)
    assert 'rank 2 has sent no heartbeat for 5 s' in failure.reason
    check_localized(job)


@pytest.mark.thorough
def test_slow_set_up_of_a_new_worker_is_not_a_hang(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    flags = flags_of(BASE)
    job = cluster(*flags, '--sparse-ckpt-window', '3', '--sparse-ckpt-hang-timeout', '4')
    mutation = 'mutations.localized:slow_set_up_of_new_worker'
    assert job.survive(fail_at='1:9:forward', mutation=mutation) == {1: 1}
    assert differences(reference(*flags), read_digest(job)) == []


@pytest.mark.thorough
def test_stopped_worker_that_resumes_is_kept(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    """No process replaced it, so nothing was lost and no rank replays."""
    flags = [*flags_of(BASE), *LONG]
    job = cluster(*flags, '--sparse-ckpt-window', '3', '--sparse-ckpt-hang-timeout', '4')
    stopped: list[int] = []

    def stop_and_wake(workers: list, start: Callable) -> None:
        if not stopped and job.events_of(WindowPersisted, rank=2):
            stopped.append(workers[2].pid)
            os.kill(workers[2].pid, signal.SIGSTOP)
        elif len(stopped) == 1 and job.events_of(FailureDetected, rank=0):
            stopped.append(workers[2].pid)
            os.kill(workers[2].pid, signal.SIGCONT)

    assert job.survive(fault=stop_and_wake, evict=False) == {}
    assert differences(reference(*flags), read_digest(job)) == []
    for rank in range(4):
        (recovered,) = job.events_of(Recovered, rank)
        assert recovered.stages == [] and recovered.replayed == 0


@pytest.mark.thorough
def test_replaced_worker_that_resumes_is_fenced(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    flags = [*flags_of(BASE), *LONG]
    job = cluster(*flags, '--sparse-ckpt-window', '3', '--sparse-ckpt-hang-timeout', '4')
    zombies: list = []

    def replace(workers: list, start: Callable) -> None:
        if not zombies and job.events_of(WindowPersisted, rank=2):
            os.kill(workers[2].pid, signal.SIGSTOP)
            zombies.append(workers[2])
        elif zombies[:1] == workers[2:3] and job.events_of(FailureDetected, rank=0):
            workers[2] = start(2, MOEVEMENT_NODE='spare')
        elif len(zombies) == 1 and job.events_of(Recovered, rank=0):
            zombies.append(zombies[0])
            os.kill(zombies[0].pid, signal.SIGCONT)

    assert job.survive(fault=replace, evict=False) == {}
    zombies[0].join(30)
    assert zombies[0].exitcode not in (None, 0)
    assert differences(reference(*flags), read_digest(job)) == []
    assert 'was replaced by another process' in job.output(0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ('fail_at', 'reason'),
    [
        ('1:2:forward', 'no window is complete on all ranks'),
        ('1:12:after-step', 'iteration 12 was the last one'),
    ],
)
def test_fallback_tier_is_used_and_its_reason_named(
    fail_at: str, reason: str, cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    flags = flags_of(BASE)
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    starts = job.survive(fail_at=fail_at)
    assert set(starts) == {0, 1, 2, 3}
    assert differences(reference(*flags), read_digest(job)) == []
    for rank in (0, 2, 3):
        (fallback,) = job.events_of(NextTier, rank)
        assert (fallback.reason, fallback.tier) == (reason, 'the whole job')


@pytest.mark.thorough
def test_recovery_verifies_itself(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    """Stage 1 replays 4 to 7; the states after 6 and 7 were captured before the failure."""
    flags = flags_of(BASE)
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    assert job.survive(fail_at='3:8:backward') == {3: 1}
    assert differences(reference(*flags), read_digest(job)) == []
    for rank in (2, 3):
        (recovered,) = job.events_of(Recovered, rank)
        assert recovered.verified > 0 and recovered.verified_at >= 6
        assert recovered.differing == []
    said = r'verified: \d+ operators at iteration \d, loss or .* of 4 iterations, differing: 0 \|'
    assert re.search(said, job.output(0))


@pytest.mark.mutation
def test_wrong_bit_in_a_replay_is_reported(cluster: Callable[..., Cluster]) -> None:
    job = cluster(*flags_of(BASE), '--sparse-ckpt-window', '3')
    wrong_bit = 'mutations.localized:one_bit_wrong_in_the_replay'
    job.survive(fail_at='3:8:backward', mutation=f'{wrong_bit},{SEALED}')
    (recovered,) = job.events_of(Recovered, rank=3)
    (wrong,) = set(re.findall(r'wrong bit in (\S+)', job.output(0)))
    assert recovered.differing, wrong
    assert re.search(r'differing: [1-9]', job.output(0))


@pytest.mark.thorough
def test_wrong_bit_after_the_newest_capture_shows_in_the_next_loss(
    cluster: Callable[..., Cluster],
) -> None:
    """The state after 6 is captured, that after 7 is not yet; its loss is recorded."""
    job = cluster(*flags_of(BASE), '--sparse-ckpt-window', '3')
    mutation = 'mutations.localized:one_bit_wrong_after_the_last_capture'
    job.survive(fail_at='3:7:after-step', mutation=mutation)
    (recovered,) = job.events_of(Recovered, rank=3)
    assert 'wrong bit in' in job.output(0)
    assert recovered.differing == ['loss from iteration 7']


MUTATIONS = {
    'data_not_moved_back': BASE,
    'recorded_norm_of_catch_up_wrong': BASE,
    'log_of_neighbour_changed': BASE,
    'iteration_state_not_rolled_back': BASE,
    'tokens_of_last_stage_not_replayed': LAYOUTS['per-token-loss'][0],
}


@pytest.mark.mutation
@pytest.mark.parametrize('mutation', with_quick(MUTATIONS, 'log_of_neighbour_changed'))
def test_omitting_a_step_of_localized_recovery_changes_the_bits(
    mutation: str, cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    flags = flags_of(MUTATIONS[mutation])
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    job.survive(fail_at='1:8:backward', mutation=f'mutations.localized:{mutation}')
    assert job.events_of(Recovered, rank=3)
    assert differences(reference(*flags), read_digest(job)) != []
