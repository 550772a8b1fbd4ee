# SPDX-License-Identifier: Apache-2.0
"""Megatron flags that no rule refuses: a lost stage recovers every bit.

Each case tries several at once.
"""

import pytest

from tests.distributed.conftest import ON_BOTH_BACKENDS, Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import NCCL_LIKE
from tests.distributed.harness.judged import judged
from tests.distributed.test_localized_recovery import BASE, BF16, PP_EP, check_localized, victims
from tests.support.quick import with_quick

pytestmark = ON_BOTH_BACKENDS

UNTIED = '--untie-embeddings-and-output-weights'
PP2 = '--pipeline-model-parallel-size 2'
TP2 = '--tensor-model-parallel-size 2 --sequence-parallel'
NO_EXPERTS_FIRST = f'--bf16 {PP_EP} {UNTIED} --moe-layer-freq [0,0,1,1]'

# Where a worker dies; flags.
CASES = {
    'selective-recompute': (
        '1:8:forward',
        f'{BASE} --recompute-granularity selective --recompute-modules core_attn mlp moe '
        '--moe-layer-freq [0,1,1,1] --moe-shared-expert-intermediate-size 32',
    ),
    'block-recompute': (
        '1:8:backward',
        f'{BF16} {PP2} {UNTIED} {TP2} --recompute-granularity full --recompute-method block '
        '--recompute-num-layers 1',
    ),
    'grouped-routing': (
        '0:9:backward',
        f'{BASE} --moe-router-score-function sigmoid --moe-router-num-groups 2 '
        '--moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 '
        '--moe-router-load-balancing-type seq_aux_loss --moe-z-loss-coeff 1e-3 '
        '--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate '
        '--timing-log-level 2 --log-num-zeros-in-grad --log-params-norm --log-throughput '
        '--moe-per-layer-logging --distributed-timeout-seconds-after-init 100',
    ),
    'global-aux-loss': (
        '3:8:forward',
        f'{BASE} --moe-router-load-balancing-type global_aux_loss --moe-router-pre-softmax '
        '--moe-token-dispatcher-type allgather --moe-input-jitter-eps 0.1',
    ),
    'quantile-balancing': (
        '2:9:reduce',
        f'{BASE} --moe-router-load-balancing-type quantile_balancing --moe-aux-loss-coeff 0 '
        '--moe-router-quantile-balancing-ema 0.5',
    ),
    'capacity-and-attention': (
        '1:8:forward',
        f'{BASE} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity '
        '--moe-token-drop-policy position --qk-layernorm --group-query-attention '
        '--num-query-groups 1 --add-qkv-bias --attention-softmax-in-fp32 --rotary-percent 0.5 '
        '--rotary-interleaved --use-rope-scaling --reset-position-ids --reset-attention-mask '
        '--eod-mask-loss',
    ),
    'tied-learned-positions': (
        '1:9:backward',
        f'{BF16} {PP2} --position-embedding-type learned_absolute --normalization LayerNorm '
        '--use-mup --mup-base-hidden-size 16',
    ),
    'rates-and-gradients': (
        '2:8:forward',
        f'{BASE} --lr-decay-style WSD --lr-wsd-decay-style cosine --lr-wsd-decay-iters 6 '
        '--lr-decay-iters 12 --weight-decay-incr-style linear --start-weight-decay 0.01 '
        '--end-weight-decay 0.2 --qk-layernorm --apply-wd-to-qk-layernorm --adam-beta2 0.95 '
        '--grad-reduce-in-bf16 --ddp-average-in-collective',
    ),
    'buckets': (
        '0:9:reduce',
        f'{BF16} {PP2} {UNTIED} --overlap-grad-reduce --overlap-param-gather --ddp-num-buckets 3 '
        '--no-align-grad-reduce --no-gradient-reduce-div-fusion '
        '--ddp-pad-buckets-for-high-nccl-busbw --use-tp-pp-dp-mapping',
    ),
    'fp32-accumulation': (
        '0:8:reduce',
        f'{BF16} {PP2} {UNTIED} --grad-reduce-in-bf16 '
        '--ddp-reduce-scatter-with-fp32-accumulation '
        '--ddp-param-name-patterns-for-fp32-local-accumulation all '
        '--global-batch-size 7 --eval-global-batch-size 8 --decrease-batch-size-if-needed',
    ),
    'batches-that-grow': (
        '1:9:forward',  # seven iterations of 4 samples, the next ones of 8, an evaluation between
        f'{BASE} --step-batch-size-schedule 0:4,896:8 --eval-interval 4 --eval-iters 2 '
        '--eval-global-batch-size 4 --eval-micro-batch-size 1 --start-eval-at-iter 5',
    ),
    'cyclic-data': ('1:8:forward', f'{BASE} --dataloader-type cyclic'),
    'layout-of-stages': (
        '2:8:forward',
        f'{BASE} --pipeline-model-parallel-layout Et|t|tt|L '
        '--microbatch-group-size-per-virtual-pipeline-stage 4 --global-batch-size 8',
    ),
    'uneven-stages': (
        '2:8:forward',
        f'{BASE} --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3 '
        '--moe-router-force-load-balancing',
    ),
    'interleaved-without-overlap': (
        '1:8:forward',
        f'{BF16} --pipeline-model-parallel-size 4 {UNTIED} --num-layers 8 '
        '--num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication',
    ),
    'layers-in-turns': (
        '1:8:forward',
        f'{BASE} --num-layers-per-virtual-pipeline-stage 1 --overlap-moe-expert-parallel-comm '
        '--ep-overlap-early-attn-memory-release --high-priority-a2a-comm-stream '
        '--moe-shared-expert-intermediate-size 32',
    ),
    'optimizer-instances': (
        '1:9:reduce',
        f'{BF16} {PP2} {UNTIED} --num-distributed-optimizer-instances 2',
    ),
    'more-tokens': (  # the embedding is on both ends, which replay together
        '1:8:forward,0:11:backward',
        f'{BF16} --pipeline-model-parallel-size 4 {UNTIED} --mtp-num-layers 2 '
        '--mtp-loss-scaling-factor 0.3 --mtp-detach-heads',
    ),
    # Stages hold different kinds of parameters, so that their optimizers differ.
    'stage-without-experts': ('0:9:forward,1:9:forward', NO_EXPERTS_FIRST),
    'stage-with-experts': ('2:9:backward,3:9:backward', NO_EXPERTS_FIRST),
    'stage-without-embedding': (
        '1:9:forward',
        f'{BF16} --pipeline-model-parallel-size 4 {UNTIED} --decoupled-lr 1e-3 '
        '--decoupled-min-lr 1e-4',
    ),
    'expert-tensor-parallel': (
        '1:8:forward',
        f'{BF16} {PP2} {UNTIED} {TP2} --expert-model-parallel-size 2 '
        '--expert-tensor-parallel-size 1 --use-cpu-initialization --embedding-init-method-std 0.05',
    ),
    'fp16-and-different-replicas': (
        '1:9:forward',
        '--fp16 --loss-scale 128 --fp16-lm-cross-entropy --accumulate-allreduce-grads-in-fp32 '
        '--apply-query-key-layer-scaling --attention-softmax-in-fp32 '
        f'{PP2} --expert-model-parallel-size 2 {UNTIED} --data-parallel-random-init '
        '--init-method-std 0.01',
    ),
}


@pytest.mark.parametrize('case', with_quick(CASES))
def test_localized_recovery_works_with_flags(
    case: str, cluster: Make, reference: Reference
) -> None:
    fail_at, setup = CASES[case]
    flags = [*setup.split(), '--train-iters', '12']
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
    flags = [*CASES['more-tokens'][1].split(), '--train-iters', '12']
    broken = cluster(*flags, '--sparse-ckpt-window', '3')
    broken.survive(
        fail_at='0:8:forward', mutation='mutations.localized:norm_of_detached_heads_wrong'
    )
    assert differences(reference(*flags), read_digest(broken)) != []
