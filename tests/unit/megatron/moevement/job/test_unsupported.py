# SPDX-License-Identifier: Apache-2.0
"""Each rule gets flags from upstream's parser, and must name the flag and the remedy."""

import re
from pathlib import Path
from typing import Any

import megatron.core
import megatron.core.optimizer
import pytest
import torch
from megatron.core import fp8_utils

from megatron.moevement.job.flag_rules import WITHOUT_ADAM, WITHOUT_ENGINE, Rule
from megatron.moevement.job.flags import REFUSED, WHOLE_JOB
from megatron.moevement.job.unsupported import hazard, not_localized, refuse_unsupported
from moevement_ext.config import ConfigurationError
from tests.stand_ins.fused_adam import FusedAdam
from tests.support.each import each
from tests.unit.megatron.moevement.job import test_identity

ROOT = Path(__file__).resolve().parents[5]
EVALUATIONS = '--eval-interval 4 --eval-iters 1'
SAME_FOLDER = '--save dense --load dense'
SCALES_LOST = '--use-precision-aware-optimizer --fp8-recipe tensorwise --save dense'

# Value of each flag, and other flags that the rule needs.
ARGUMENTS = {
    '--optimizer': 'sgd',
    '--fp16': '--use-precision-aware-optimizer',
    '--exp-avg-dtype': f'fp16 {SCALES_LOST}',
    '--exp-avg-sq-dtype': f'fp8 {SCALES_LOST}',
    '--main-params-dtype': (
        'fp32 --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather '
        '--use-precision-aware-optimizer'
    ),
    '--fp8-param-gather': '--fp8-format hybrid --fp8-recipe mxfp8',
    '--fp8-format': 'hybrid',
    '--fp8-recipe': 'delayed --fp8-format hybrid --mtp-num-layers 1',
    '--fp8-quantizer-factory': 'own.quantizer',
    '--eval-interval': '4 --eval-iters 1 --dataloader-type cyclic',
    '--eval-iters': '2 --eval-interval 4 --fp8-format hybrid --fp8-recipe delayed',
    '--fp4-format': 'e2m1',
    '--te-precision-config-file': 'recipes.yaml',
    '--tensor-parallel-num-weight-shards': '4 --tensor-model-parallel-size 2',
    '--expert-tensor-parallel-num-weight-shards': '2',
    '--cuda-graph-impl': 'local',
    '--cuda-graph-warmup-steps': '0 --cuda-graph-impl transformer_engine',
    '--use-grouped-gemm-for-shared-expert': '--delay-wgrad-compute',
    '--moe-expert-rank-capacity-factor': '1.5',
    '--moe-router-force-biased': '0.5',
    '--transformer-impl': 'inference_optimized',
    '--hybrid-layer-pattern': 'M*M*',
    '--experimental-attention-variant': 'dsa',
    '--error-injection-rate': '100',
    '--moe-router-enable-expert-bias': '--check-for-large-grads',
    '--moe-router-load-balancing-type': 'quantile_balancing --check-for-large-grads',
    '--result-rejected-tracker-filename': '/dev/null',
    '--iterations-to-skip': '3 4',
    '--yaml-cfg': 'all.yaml',
    '--ckpt-convert-format': 'torch',
    '--pretrained-checkpoint': 'dense',
    '--sparse-ckpt-elastic': 'restart',
    '--override-ckpt-iteration': '0',
    '--finetune': SAME_FOLDER,
    '--no-load-optim': SAME_FOLDER,
    '--no-load-rng': SAME_FOLDER,
    '--no-save-optim': SAME_FOLDER,
    '--no-save-rng': SAME_FOLDER,
    '--save-params-interval': '5',
    '--save-wgrads-interval': '5',
    '--save-dgrads-interval': '5',
    '--save-activations-interval': '5',
    '--save-tokens-per-expert-interval': '5',
    '--logits-save-dir': 'logits',
    '--logits-load-dir': 'logits',
    '--cpu-offloading-num-layers': '1',
    '--pipeline-model-parallel-layout': 'Et|tt|m|L',
    '--rerun-mode': 'report_stats',
    '--moe-token-dispatcher-type': 'flex',
    '--symmetric-ar-type': 'two_shot',
    '--high-priority-stream-groups': 'dp_cp',
    '--nccl-communicator-config-path': 'nccl.yaml',
    '--pipeline-model-parallel-comm-backend': 'ucc',
    '--hierarchical-context-parallel-sizes': '2 2',
    '--disable-gloo-process-groups': '--distributed-backend nccl',
    '--overlap-p2p-communication-warmup-flush': '--distributed-backend nccl',
    '--moe-input-jitter-eps': f'0.1 {EVALUATIONS}',
    '--moe-router-force-load-balancing': EVALUATIONS,
    '--dataloader-type': 'external',
    '--phase-transition-iterations': '5,10',
    '--dump-param-to-param-group-map': 'map',
    '--non-persistent-ckpt-type': 'local',
    '--check-weight-hash-across-dp-replicas-interval': '5',
    '--gpu-sniff-test-interval': '5',
    '--moe-routing-trace-path': 'trace',
}
# The same, for flags with some values that are refused and others that recover the whole job.
RECOVERED = {'--cuda-graph-impl': ('transformer_engine', 'full_iteration')}


def parsed(*flags: str) -> dict[str, Any]:
    return vars(test_identity.parsed(*flags))


def given(rule: Rule, *more: str) -> dict[str, Any]:
    """Settings of the flag of a rule from upstream's parser, on gloo unless a backend is named."""
    rest = ARGUMENTS.get(rule.flag, '')
    values = rest.split()
    flags = [*values, *more] if 'gloo' in rule.flag else [rule.flag, *values, *more]
    if '--distributed-backend' not in rest:
        flags += ['--distributed-backend', 'gloo']
    return parsed(*flags)


def flag_of(rule: Rule) -> str:
    return rule.flag


def with_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make upstream find Transformer Engine."""
    monkeypatch.setattr(fp8_utils, 'TEDelayedScaling', object, raising=False)


@each('rule', REFUSED)
def test_refused_flag_is_named_with_the_remedy(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    adam = torch.optim.AdamW if rule.when is WITHOUT_ADAM else FusedAdam
    monkeypatch.setattr(megatron.core.optimizer, 'Adam', adam)
    if rule.when is not WITHOUT_ENGINE:
        with_engine(monkeypatch)
    with pytest.raises(ConfigurationError) as refused:
        refuse_unsupported(given(rule))
    message = str(refused.value)
    assert message.startswith(f'--sparse-ckpt does not support {rule.flag}')
    assert rule.instead in message and '\n' not in message


def test_elastic_job_names_its_batch() -> None:
    """Upstream's validation sets the size of a batch that is not given."""
    elastic = '--sparse-ckpt-elastic restart --distributed-backend gloo'.split()
    given = parsed(*elastic, '--global-batch-size', '8')
    refuse_unsupported(given)
    by_default = {**given, '_is_global_batch_size_explicitly_specified': False}
    with pytest.raises(ConfigurationError, match='restart without --global-batch-size'):
        refuse_unsupported(by_default)


@pytest.mark.parametrize('flags', ['--use-distributed-optimizer', '--muon-scalar-optimizer lion'])
def test_muon_with_uncaptured_state_is_refused(flags: str) -> None:
    with pytest.raises(ConfigurationError, match='--optimizer muon'):
        refuse_unsupported(parsed('--optimizer', 'muon', *flags.split()))


@each('rule', WHOLE_JOB)
def test_whole_job_flag_is_named_with_the_remedy(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_engine(monkeypatch)
    values = RECOVERED.get(rule.flag)
    for more in [[rule.flag, value] for value in values] if values else [[]]:
        settings = given(rule, '--save', 'dense', *more)
        refuse_unsupported(settings)
        reason = not_localized(settings)
        assert reason is not None and reason.startswith(rule.flag)
        assert rule.instead in reason and '\n' not in reason


def test_default_flags_need_only_gloo_groups_disabled_for_localized_recovery() -> None:
    settings = parsed()
    refuse_unsupported(settings)
    assert [rule.flag for rule in WHOLE_JOB if rule.applies(settings)] == [
        '--disable-gloo-process-groups'
    ]


@pytest.mark.parametrize(
    'flags',
    [
        '--disable-gloo-process-groups',
        '--distributed-backend gloo',
        '--distributed-backend gloo --overlap-p2p-communication-warmup-flush',
        '--disable-gloo-process-groups --moe-input-jitter-eps 0.1 --eval-interval 4 --eval-iters 0',
        '--disable-gloo-process-groups --moe-router-force-load-balancing',
        '--disable-gloo-process-groups --check-for-large-grads --rerun-mode disabled',
        '--disable-gloo-process-groups --finetune --load pretrained --save dense',
        '--disable-gloo-process-groups --no-save-optim --save dense',
        '--disable-gloo-process-groups --tensor-parallel-num-weight-shards 2 '
        '--tensor-model-parallel-size 2',
        '--disable-gloo-process-groups --moe-token-dispatcher-type alltoall',
        '--disable-gloo-process-groups --dataloader-type cyclic',
        '--disable-gloo-process-groups --dataloader-type cyclic --eval-interval 4 --eval-iters 0',
        '--disable-gloo-process-groups --dataloader-type single --eval-interval 4 --eval-iters 1',
        '--disable-gloo-process-groups --non-persistent-ckpt-type global',
        '--disable-gloo-process-groups --num-distributed-optimizer-instances 2',
        '--disable-gloo-process-groups --optimizer muon',
        '--disable-gloo-process-groups --mtp-num-layers 1 '
        '--pipeline-model-parallel-layout Et|tt|mL',
    ],
)
def test_other_values_allow_localized_recovery(flags: str) -> None:
    settings = parsed(*flags.split())
    refuse_unsupported(settings)
    assert not_localized(settings) is None


@pytest.mark.parametrize(
    'flags',
    [
        '--fp8-format hybrid --fp8-recipe tensorwise --mtp-num-layers 1 --eval-interval 4',
        '--fp8-format hybrid --fp8-recipe blockwise --eval-interval 4 --eval-iters 2',
        '--fp8-format hybrid --fp8-recipe mxfp8',
        '--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather',
        '--fp8-format hybrid --fp8-recipe blockwise --fp8-param-gather',
        '--fp8-format hybrid --fp8-recipe delayed --fp8-param-gather',
        '--fp8-format hybrid --eval-iters 0',
        '--fp8-recipe delayed --eval-iters 2',
    ],
)
def test_fp8_computation_allows_localized_recovery(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_engine(monkeypatch)
    settings = parsed(*flags.split(), '--distributed-backend', 'gloo')
    refuse_unsupported(settings)
    assert not_localized(settings) is None


WEIGHTS_IN_FP8 = '--fp8-format hybrid --fp8-param-gather'
DELAYED_WEIGHTS = f'{WEIGHTS_IN_FP8} --fp8-recipe delayed --use-precision-aware-optimizer'


@pytest.mark.parametrize(
    ('flags', 'remedy'),
    [
        (f'{WEIGHTS_IN_FP8} --fp8-recipe mxfp8', 'use --fp8-recipe delayed, tensorwise or block'),
        (DELAYED_WEIGHTS, 'give fp16 with --fp8-recipe delayed'),
        (
            f'{WEIGHTS_IN_FP8} --fp8-recipe blockwise --use-precision-aware-optimizer '
            '--main-params-dtype fp16',
            'and fp32 with tensorwise or blockwise',
        ),
    ],
)
def test_unsupported_fp8_weights_are_refused(
    flags: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_engine(monkeypatch)
    monkeypatch.setattr(megatron.core.optimizer, 'Adam', FusedAdam)
    with pytest.raises(ConfigurationError, match=remedy):
        refuse_unsupported(parsed(*flags.split()))


@pytest.mark.parametrize('dtype', ['fp16', 'fp8'])
def test_fp8_weights_with_scaled_masters_are_accepted(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_engine(monkeypatch)
    monkeypatch.setattr(megatron.core.optimizer, 'Adam', FusedAdam)
    settings = parsed(*DELAYED_WEIGHTS.split(), '--distributed-backend', 'gloo')
    settings['main_params_dtype'] = {'fp16': torch.float16, 'fp8': torch.uint8}[
        dtype
    ]  # as upstream's validation sets it
    refuse_unsupported(settings)
    assert not_localized(settings) is None


def test_delayed_scaling_with_cuda_graphs_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_engine(monkeypatch)
    recorded = '--fp8-format hybrid --cuda-graph-impl transformer_engine --fp8-recipe'.split()
    with pytest.raises(ConfigurationError, match='--fp8-recipe delayed with .* or --cuda-gr'):
        refuse_unsupported(parsed(*recorded, 'delayed'))
    refuse_unsupported(parsed(*recorded, 'blockwise'))


def test_delayed_scaling_with_several_model_chunks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_engine(monkeypatch)
    settings = parsed('--fp8-format', 'hybrid', '--num-layers-per-virtual-pipeline-stage', '1')
    settings['virtual_pipeline_model_parallel_size'] = 2  # as upstream's validation sets it
    with pytest.raises(ConfigurationError, match='--fp8-recipe delayed with --fp8-format and'):
        refuse_unsupported(settings)


PRECISION_AWARE = '--use-precision-aware-optimizer'


@pytest.mark.parametrize(
    'flags',
    [
        f'{PRECISION_AWARE} --fp16 --accumulate-allreduce-grads-in-fp32 --save dense',
        f'{PRECISION_AWARE} --fp16 --clip-grad 0',
        f'{PRECISION_AWARE} --fp16 --fp8-recipe tensorwise',
        f'{PRECISION_AWARE} --exp-avg-dtype fp8 --save dense',
        f'{PRECISION_AWARE} --exp-avg-dtype fp8 --fp8-recipe tensorwise',
        f'{PRECISION_AWARE} --exp-avg-dtype bf16 --fp8-recipe tensorwise --load dense',
        f'{PRECISION_AWARE} --exp-avg-sq-dtype fp8 --fp8-recipe tensorwise --save dense '
        '--main-params-dtype fp16',
        '--fp16',
    ],
)
def test_low_precision_state_that_upstream_keeps_is_accepted(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron.core.optimizer, 'Adam', FusedAdam)
    settings = parsed(*flags.split(), '--distributed-backend', 'gloo')
    refuse_unsupported(settings)
    assert not_localized(settings) is None


@pytest.mark.parametrize('flag', ['--exp-avg-dtype', '--exp-avg-sq-dtype'])
def test_moments_that_upstream_may_lose_cause_a_warning(flag: str) -> None:
    settings = parsed(PRECISION_AWARE, flag, 'fp8')
    assert 'NaN' in str(hazard(settings))
    settings[flag.removeprefix('--').replace('-', '_')] = (
        torch.uint8
    )  # as upstream's validation sets it
    assert 'NaN' in str(hazard(settings))
    assert hazard(parsed(PRECISION_AWARE, flag, 'fp16')) is None
    assert hazard({}) is None


@pytest.mark.parametrize(('release', 'checked'), [('0.19.2+24352eb5', True), ('0.20.0', False)])
def test_another_release_causes_a_warning(
    release: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its private parts may have the names that the start looks for, and another meaning."""
    monkeypatch.setattr(megatron.core, '__version__', release)
    assert ('rehearse' in str(hazard({}))) is not checked


def test_masters_that_lose_small_updates_cause_a_warning() -> None:
    settings = parsed(PRECISION_AWARE, '--exp-avg-dtype', 'fp8')
    settings['main_params_dtype'] = torch.uint8
    assert 'updates that are small relative to a weight are lost' in str(hazard(settings))
    assert 'NaN' not in str(hazard(settings)), (
        'what keeps such masters minds a state that is all zero'
    )


@pytest.mark.parametrize(('ranks', 'warned'), [(1, False), (2, True), (None, False)])
def test_scales_that_upstream_may_not_update_cause_a_warning(
    ranks: int | None, warned: bool
) -> None:
    settings = parsed(*f'{DELAYED_WEIGHTS} --main-params-dtype fp16'.split())
    settings['data_parallel_size'] = ranks
    assert ('leaves the scale' in str(hazard(settings))) is warned


def test_value_is_shown_as_the_user_wrote_it() -> None:
    with pytest.raises(ConfigurationError, match=r'^[^:]*--optimizer sgd: use --optimizer adam,'):
        refuse_unsupported(parsed('--optimizer', 'sgd'))
    settings = parsed(
        '--distributed-backend', 'gloo', '--moe-input-jitter-eps', '0.1', *EVALUATIONS.split()
    )
    reason = not_localized(settings)
    assert reason is not None and reason.startswith('--moe-input-jitter-eps 0.1 with evaluations:')


def test_custom_loop_may_lack_settings() -> None:
    refuse_unsupported({'optimizer': 'adam'})
    assert not_localized({'distributed_backend': 'nccl'}) is None


def test_start_page_quotes_the_log_line() -> None:
    page = (ROOT / 'docs' / 'start.md').read_text('utf-8')
    (quoted,) = re.findall(r'((?: {4}.*\n)+)', page[page.index('the log says so at the start:') :])[
        :1
    ]
    said = not_localized(parsed('--async-save', '--disable-gloo-process-groups'))
    start = 'sparse checkpointing: recovery restarts the whole job: '
    assert ' '.join(quoted.split()) == f'{start}{said}'
