# SPDX-License-Identifier: Apache-2.0
"""Each rule gets flags from upstream's parser and names flag and remedy; the page lists them."""

import importlib.metadata
import re
from collections import Counter
from typing import Any

import megatron.core
import megatron.core.optimizer
import pytest
import torch
from megatron.core import fp8_utils

from megatron.moevement.job.flag_rules import CONDITIONS, REFUSED, WHOLE_JOB, Rule
from megatron.moevement.job.flags import hazard, not_localized, refuse_unsupported
from moevement_ext.config import ConfigurationError
from tests.stand_ins.fused_adam import FusedAdam
from tests.support.each import each
from tests.unit.megatron.moevement.job import test_identity
from tests.unit.megatron.moevement.job.test_identity import DATA, _parser
from tools import compatibility

VALUES, OTHERS = DATA['values'], DATA['others']
LOCALIZED = (
    *DATA['localized_over_nccl'],
    *(f'--distributed-backend gloo {flags}' for flags in DATA['localized']),
)
PRECISION_AWARE = '--use-precision-aware-optimizer'

# The same, for flags with some values that are refused and others that recover the whole job.
RECOVERED = {'--cuda-graph-impl': ('transformer_engine', 'full_iteration')}
BY_TYPE = {None: 'text', str: 'text', int: '5', float: '0.5'}


def value_of(rule: Rule) -> list[str]:
    """A value that the rule excludes; none for a switch."""
    (action,) = (one for one in _parser()._actions if rule.flag in one.option_strings)
    if action.nargs == 0:
        return []
    of_rule = rule.values.words if ' ' not in rule.values.words else ''
    return (VALUES.get(rule.flag) or of_rule or BY_TYPE.get(action.type, '5')).split()


def parsed(*flags: str) -> dict[str, Any]:
    return vars(test_identity.parsed(*flags))


def given(rule: Rule, *more: str) -> dict[str, Any]:
    """Settings of the flag of a rule from upstream's parser, on gloo unless a backend is named."""
    rest = OTHERS.get(rule.flag, '')
    flags = [rule.flag, *value_of(rule), *rest.split(), *more]
    if 'gloo' in rule.flag:
        flags = [*rest.split(), *more]
    if '--distributed-backend' not in rest:
        flags += ['--distributed-backend', 'gloo']
    return parsed(*flags)


def with_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make upstream find Transformer Engine, and its Adam."""
    monkeypatch.setattr(megatron.core.optimizer, 'Adam', FusedAdam)
    monkeypatch.setattr(fp8_utils, 'TEDelayedScaling', object, raising=False)


@each('rule', REFUSED)
def test_refused_flag_is_named_with_the_remedy(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    if rule.when not in (CONDITIONS['without_adam'], CONDITIONS['without_engine']):
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


@each('flags', LOCALIZED)
def test_other_values_allow_localized_recovery(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_engine(monkeypatch)
    settings = parsed(*flags.split())
    refuse_unsupported(settings)
    assert not_localized(settings) is None


WEIGHTS_IN_FP8 = '--fp8-format hybrid --fp8-param-gather'
DELAYED_WEIGHTS = f'{WEIGHTS_IN_FP8} --fp8-recipe delayed --use-precision-aware-optimizer'


@pytest.mark.parametrize(('flags', 'remedy'), DATA['not_captured'])
def test_state_that_is_not_captured_is_refused(
    flags: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_engine(monkeypatch)
    with pytest.raises(ConfigurationError, match=remedy):
        refuse_unsupported(parsed(*flags.split()))


@pytest.mark.parametrize('dtype', ['fp16', 'fp8'])
def test_fp8_weights_with_scaled_masters_are_accepted(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_engine(monkeypatch)
    settings = parsed(*DELAYED_WEIGHTS.split(), '--distributed-backend', 'gloo')
    settings['main_params_dtype'] = {'fp16': torch.float16, 'fp8': torch.uint8}[
        dtype
    ]  # as upstream's validation sets it
    refuse_unsupported(settings)
    assert not_localized(settings) is None


def test_delayed_scaling_in_several_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_engine(monkeypatch)
    recorded = parsed('--fp8-format', 'hybrid', '--cuda-graph-impl', 'transformer_engine')
    chunks = parsed('--fp8-format', 'hybrid', '--num-layers-per-virtual-pipeline-stage', '1')
    chunks['virtual_pipeline_model_parallel_size'] = 2  # as upstream's validation sets it
    for settings in (recorded, chunks):
        with pytest.raises(ConfigurationError, match='--fp8-recipe delayed with --fp8-format and'):
            refuse_unsupported(settings)
        refuse_unsupported({**settings, 'fp8_recipe': 'blockwise'})


@pytest.mark.parametrize(('release', 'checked'), [('0.19.2+24352eb5', True), ('0.20.0', False)])
def test_another_release_causes_a_warning(
    release: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its private parts may have the names that the start looks for, and another meaning."""
    monkeypatch.setattr(megatron.core, '__version__', release)
    assert ('rehearse' in str(hazard({}))) is not checked


SMALL_UPDATES = 'updates that are small relative to a weight are lost'
ADAM_SCALES = f'{DELAYED_WEIGHTS} --main-params-dtype fp16'


@pytest.mark.parametrize(
    ('flags', 'validated', 'warning'),
    [
        (f'{PRECISION_AWARE} --exp-avg-dtype fp8', {}, 'NaN'),
        (f'{PRECISION_AWARE} --exp-avg-sq-dtype fp8', {}, 'NaN'),
        (PRECISION_AWARE, {'exp_avg_dtype': torch.uint8}, 'NaN'),
        (PRECISION_AWARE, {'exp_avg_sq_dtype': torch.uint8}, 'NaN'),
        (f'{PRECISION_AWARE} --exp-avg-dtype fp16', {}, None),
        (f'{PRECISION_AWARE} --exp-avg-sq-dtype fp16', {}, None),
        # What keeps such masters minds a state that is all zero.
        (
            f'{PRECISION_AWARE} --exp-avg-dtype fp8',
            {'main_params_dtype': torch.uint8},
            f'^(?!.*NaN).*{SMALL_UPDATES}',
        ),
        (ADAM_SCALES, {'data_parallel_size': 1}, None),
        (ADAM_SCALES, {'data_parallel_size': 2}, 'leaves the scale'),
        (ADAM_SCALES, {'data_parallel_size': None}, None),
    ],
)
def test_state_that_upstream_may_lose_causes_a_warning(
    flags: str, validated: dict[str, object], warning: str | None
) -> None:
    """Upstream's validation sets types and the number of ranks."""
    found = hazard(parsed(*flags.split()) | validated)
    assert found is None if warning is None else re.search(warning, str(found), re.DOTALL)


LONGEST_PAGE = 135


def test_each_setting_has_at_most_one_rule() -> None:
    for rules in (REFUSED, WHOLE_JOB):
        ruled = Counter(rule.setting for rule in rules)
        assert not [name for name, count in ruled.items() if count > 1]


def test_rules_name_flags_of_the_parser() -> None:
    """A rule for a flag that upstream drops must be deleted."""
    written = {flag: one.dest for one in _parser()._actions for flag in one.option_strings}
    for rule in (*REFUSED, *WHOLE_JOB):
        assert written.get(rule.flag) == rule.setting, rule.flag


def test_page_is_up_to_date_and_short() -> None:
    """If not: `python -m tools.compatibility --write`."""
    page = compatibility.DOCUMENT.read_text('utf-8')
    assert page == compatibility.document()
    assert len(page.splitlines()) < LONGEST_PAGE


def test_installed_versions_are_listed_as_checked() -> None:
    installed = [
        importlib.metadata.version(name).partition('+')[0] for name in ('torch', 'megatron-core')
    ]
    assert any(
        installed == [row[0].split()[1].rstrip(','), row[1]] for row in compatibility.CHECKED
    )
