# SPDX-License-Identifier: Apache-2.0
"""Megatron flags that no rule refuses: a lost stage recovers every bit.

Each case tries several at once.
"""

import pytest

from tests.distributed.conftest import ON_BOTH_BACKENDS, Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import NCCL_LIKE
from tests.distributed.harness.judged import judged
from tests.distributed.harness.setups import BF16, PP2, PP_EP, UNTIED, setups
from tests.distributed.test_localized_recovery import BASE, check_localized, victims
from tests.support.quick import with_quick

pytestmark = ON_BOTH_BACKENDS

CASES = setups('compatible')


@pytest.mark.parametrize('case', with_quick(CASES))
def test_localized_recovery_works_with_flags(
    case: str, cluster: Make, reference: Reference
) -> None:
    fail_at = CASES[case]['dies']
    flags = [*CASES[case]['flags'].split(), '--train-iters', '12']
    undisturbed = reference(*flags)
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    assert judged(job).localized
    assert job.survive(fail_at=fail_at) == victims(fail_at)
    check_localized(job, undisturbed)


@pytest.mark.thorough
def test_localized_recovery_works_with_overlapping_shared_experts(
    cluster: Make, reference: Reference
) -> None:
    """Rank 0 waits for tokens of rank 1, with its shared experts half done."""
    flags = [
        *f'{BF16} {PP_EP} {UNTIED} --train-iters 12 --moe-token-dispatcher-type alltoall'.split(),
        *'--moe-shared-expert-intermediate-size 32 --moe-shared-expert-overlap'.split(),
    ]
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    assert job.survive(mutation='mutations.upstream_variants:dies_within_a_layer') == {1: 1}
    check_localized(job, reference(*flags))


@pytest.mark.thorough
def test_a_worker_dies_in_a_report_of_stragglers(cluster: Make, reference: Reference) -> None:
    flags = f'{BF16} {PP2} {UNTIED} --train-iters 12'.split()
    job = cluster(*flags, '--log-straggler', '--sparse-ckpt-window', '3')
    dies = 'mutations.upstream_variants:dies_in_a_report_of_stragglers'
    assert job.survive(mutation=dies) == {1: 1}
    check_localized(job, reference(*flags))


# A survivor waits for the last stage between two micro-batches, and reduces no gradients meanwhile.
HELD_BACK = [
    *f'{BF16} {PP2} {UNTIED} --overlap-grad-reduce --overlap-param-gather'.split(),
    *'--global-batch-size 8 --train-iters 12'.split(),
]


@pytest.mark.thorough
def test_no_sync_context_of_a_cut_off_iteration_ends_with_it(
    cluster: Make, reference: Reference
) -> None:
    job = cluster(*HELD_BACK, '--sparse-ckpt-window', '3')
    collector = 'mutations.localized:collector_comes_in_iteration_10'
    assert job.survive(fail_at='3:8:backward', mutation=collector) == {3: 1}
    check_localized(job, reference(*HELD_BACK))


@pytest.mark.mutation
@pytest.mark.thorough
def test_no_sync_context_left_to_the_collector_matters_over_gloo_only(
    backend: str, cluster: Make, reference: Reference
) -> None:
    """Over NCCL calls return when a peer is lost: the schedule ends, and leaves nothing behind."""
    job = cluster(*HELD_BACK, '--sparse-ckpt-window', '3')
    left = 'mutations.localized:what_was_cut_off_is_left_to_the_collector'
    job.survive(fail_at='3:8:backward', mutation=left)
    differ = differences(reference(*HELD_BACK), read_digest(job)) != []
    assert differ == (backend != NCCL_LIKE)


@pytest.mark.thorough
def test_localized_recovery_works_with_variable_sequence_lengths(cluster: Make) -> None:
    """Their shapes come from the log, like the tensors."""
    flags = [*f'{BASE} --train-iters 12'.split()]
    variant = 'mutations.upstream_variants:different_lengths'
    undisturbed = cluster(*flags, sparse=False)
    undisturbed.finish(mutation=variant)
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    assert job.survive(fail_at='1:8:forward', mutation=variant) == {1: 1}
    check_localized(job, read_digest(undisturbed))


@pytest.mark.thorough
def test_localized_recovery_works_with_muon(cluster: Make, reference: Reference) -> None:
    pytest.importorskip('emerging_optimizers')
    flags = f'--bf16 {PP_EP} {UNTIED} --optimizer muon --train-iters 12'.split()
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    assert job.survive(fail_at='1:8:forward') == {1: 1}
    check_localized(job, reference(*flags))


@pytest.mark.mutation
@pytest.mark.thorough
def test_wrong_norm_of_detached_heads_changes_the_bits(cluster: Make, reference: Reference) -> None:
    flags = [*CASES['more-tokens']['flags'].split(), '--train-iters', '12']
    broken = cluster(*flags, '--sparse-ckpt-window', '3')
    broken.survive(
        fail_at='0:8:forward', mutation='mutations.localized:norm_of_detached_heads_wrong'
    )
    assert differences(reference(*flags), read_digest(broken)) != []
