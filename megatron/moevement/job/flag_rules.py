# SPDX-License-Identifier: Apache-2.0
"""Rules about flags: values of a flag, and conditions on others, that exclude a kind of recovery.

The rules are in `flag_rules.toml`, by names of this module. A custom loop has no settings for
features that only upstream's trainer has. Settings hold data types by name, as the user writes
them, or as torch types once upstream has validated them.
"""

import inspect
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron.moevement.facts import Settings


def number(settings: Settings, name: str, otherwise: int) -> int:
    """A setting as a number; `otherwise` if the setting is missing or not a number."""
    value = settings.get(name)
    return value if isinstance(value, int) else otherwise


@dataclass(frozen=True)
class Values:
    """A set of values of a flag. None, the value of an absent flag, never belongs to it."""

    words: str
    """Shown after the flag in a table."""
    holds: Callable[[object], bool]


@dataclass(frozen=True)
class Condition:
    """A condition on other flags, in addition to the value of the rule's flag."""

    words: str
    """Shown after the flag and its values in a table or message."""
    holds: Callable[[Settings], bool]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Some values of a flag exclude a kind of recovery."""

    flag: str
    """The flag as the user writes it, with dashes."""
    setting: str
    """Name of the setting that the rule reads."""
    reason: str
    """Cause of the exclusion, as a clause without a full stop."""
    instead: str
    """What to do, as a command."""
    values: Values
    when: Condition

    def applies(self, settings: Settings) -> bool:
        """True if the rule excludes `settings`."""
        value = settings.get(self.setting)
        return value is not None and self.values.holds(value) and self.when.holds(settings)

    def shown(self, settings: Settings) -> str:
        """The flag with its value, as on a command line."""
        value = settings[self.setting]
        words = f' {value}' if isinstance(value, str | int | float) and value is not True else ''
        return f'{self.flag}{words}{self.when.words and " "}{self.when.words}'


# Precision: where upstream's precision-aware optimizer is unavailable, or deviates from its flags.

_FP32 = ('fp32', 'torch.float32')
FP8 = ('fp8', 'torch.uint8')
_SCALED = ('fp16', 'torch.float16', *FP8)
_RECIPES_OF_WEIGHTS = ('delayed', 'tensorwise', 'blockwise')


def _has_fp32_masters(settings: Settings) -> bool:
    return str(settings.get('main_params_dtype', _FP32[0])) in _FP32


def _megatron_holds_masters(settings: Settings) -> bool:
    """Upstream's rule. If False, the optimizer holds the masters and writes the weights itself."""
    return settings.get('fp8_recipe') not in (None, 'delayed') and _has_fp32_masters(settings)


def _lacks_adam(settings: Settings) -> bool:
    """True if upstream's Adam is not the Adam of Transformer Engine."""
    from megatron.core import optimizer

    return 'master_weight_dtype' not in inspect.signature(optimizer.Adam).parameters


def _lacks_engine(settings: Settings) -> bool:
    """True if upstream found no Transformer Engine, and silently continues in 16 bits."""
    from megatron.core import fp8_utils

    return not hasattr(fp8_utils, 'TEDelayedScaling')


def _has_fp16_gradients(settings: Settings) -> bool:
    in_fp32 = ('accumulate_allreduce_grads_in_fp32', 'grad_reduce_in_fp32')
    return (
        bool(settings.get('use_precision_aware_optimizer'))
        and not _megatron_holds_masters(settings)
        and not any(settings.get(name) for name in in_fp32)
        and bool(settings.get('clip_grad'))
    )


def _delayed(settings: Settings) -> bool:
    return bool(settings.get('fp8')) and settings.get('fp8_recipe') == 'delayed'


def _delayed_in_parts(settings: Settings) -> bool:
    """True if a rank computes in several parts, each with its own fp8 context for its modules."""
    chunks = number(settings, 'virtual_pipeline_model_parallel_size', 1)
    recorded = settings.get('cuda_graph_impl') not in (None, 'none')
    return _delayed(settings) and (chunks > 1 or bool(settings.get('mtp_num_layers')) or recorded)


def _masters_against_recipe(settings: Settings) -> bool:
    """True if `--main-params-dtype` does not suit `--fp8-recipe` for weights in fp8.

    With delayed scaling upstream supports fp8 weights only with narrow masters: Adam keeps the
    masters, and stores fp32 masters as 16 bits in addition to a 16-bit weight. With other recipes
    Megatron keeps fp32 masters; an Adam configured to keep them gets no view of the weights.
    """
    recipe = settings.get('fp8_recipe')
    return (
        bool(settings.get('fp8_param_gather') and settings.get('use_precision_aware_optimizer'))
        and recipe in _RECIPES_OF_WEIGHTS
        and _has_fp32_masters(settings) == (recipe == 'delayed')
    )


def keeps_fp8_masters(settings: Settings) -> bool:
    """True if masters are fp8: updates too small for 8 bits are lost."""
    return str(settings.get('main_params_dtype')) in FP8


def leaves_scales_of_others(settings: Settings) -> bool:
    """True if upstream may leave the scale of an fp8 weight stale on ranks without a part of it.

    Upstream's fp8 update writes the scales of the weights it gets, and each rank gets only some.
    """
    return (
        _delayed(settings)
        and bool(settings.get('use_precision_aware_optimizer'))
        and bool(settings.get('fp8_param_gather'))
        and number(settings, 'data_parallel_size', 1) > 1
    )


# Other conditions.


def _is_not_replicated_muon(settings: Settings) -> bool:
    # Upstream's validation turns the first flag into the second setting.
    sharded = ('use_distributed_optimizer', 'use_layer_wise_distributed_optimizer')
    return (
        settings.get('optimizer') != 'muon'
        or any(settings.get(name) for name in sharded)
        or settings.get('muon_scalar_optimizer') != 'adam'
    )


def _on_nccl(settings: Settings) -> bool:
    return settings.get('distributed_backend') == 'nccl'


def _validates(settings: Settings) -> bool:
    return settings.get('rerun_mode') == 'validate_results'


def _runs_again(settings: Settings) -> bool:
    checks = ('check_for_large_grads', 'check_for_spiky_loss')
    return _validates(settings) and any(settings.get(name) for name in checks)


def _more_shards_than(ranks: str, shards: str) -> Condition:
    """A weight has more shards than ranks that compute with a part of it."""
    return Condition(
        'above the tensor-parallel size',
        lambda settings: number(settings, shards, 1) > number(settings, ranks, 1),
    )


VALUES = {
    'given': Values('', bool),  # all that are true in Python
    'any': Values('', lambda value: True),  # also zero and an empty text
    'true': Values('', lambda value: value is True),
    'scaled': Values('fp16 or fp8', lambda value: str(value) in _SCALED),
    'neither_adam_nor_muon': Values(
        'other than adam, and than muon with --muon-scalar-optimizer adam and without '
        '--use-distributed-optimizer',
        lambda value: value != 'adam',
    ),
    'balances_quantiles': Values(
        'with quantile_balancing',
        lambda kinds: 'quantile_balancing' in (kinds if isinstance(kinds, list) else [kinds]),
    ),
    'predicts_early': Values(
        'with m before the last stage', lambda value: 'm' in str(value).rpartition('|')[0]
    ),
}
CONDITIONS = {
    'always': Condition('', lambda settings: True),
    'without_adam': Condition('without Transformer Engine', _lacks_adam),
    'without_engine': Condition('without Transformer Engine', _lacks_engine),
    'fp16_gradients': Condition('with --use-precision-aware-optimizer', _has_fp16_gradients),
    'scales_lost': Condition(
        'with --fp8-recipe other than delayed and dense checkpoints',
        lambda settings: (
            bool(settings.get('save') or settings.get('load')) and _megatron_holds_masters(settings)
        ),
    ),
    'untried_weights': Condition(
        'with --fp8-recipe other than delayed, tensorwise and blockwise',
        lambda settings: settings.get('fp8_recipe') not in _RECIPES_OF_WEIGHTS,
    ),
    'masters_against_recipe': Condition(
        'with --fp8-param-gather, --use-precision-aware-optimizer and an --fp8-recipe that does '
        'not support it',
        _masters_against_recipe,
    ),
    'delayed_in_parts': Condition(
        'with --fp8-format and interleaved stages, --mtp-num-layers or --cuda-graph-impl',
        _delayed_in_parts,
    ),
    'delayed_evaluations': Condition(
        'with --fp8-recipe delayed',
        lambda settings: _delayed(settings) and bool(settings.get('eval_interval')),
    ),
    'not_replicated_muon': Condition('', _is_not_replicated_muon),
    'more_shards': _more_shards_than(
        'tensor_model_parallel_size', 'tensor_parallel_num_weight_shards'
    ),
    'more_expert_shards': _more_shards_than(
        'expert_tensor_parallel_size', 'expert_tensor_parallel_num_weight_shards'
    ),
    'records_layers': Condition(
        'with --cuda-graph-impl transformer_engine',
        lambda settings: settings.get('cuda_graph_impl') == 'transformer_engine',
    ),
    'delays_gradients': Condition(
        'with --delay-wgrad-compute', lambda settings: bool(settings.get('delay_wgrad_compute'))
    ),
    'on_nccl': Condition('with --distributed-backend nccl', _on_nccl),
    'missing_on_nccl': Condition('is missing beside --distributed-backend nccl', _on_nccl),
    'validated': Condition('without --rerun-mode disabled', _validates),
    'reruns': Condition(
        'with --check-for-large-grads or --check-for-spiky-loss, without --rerun-mode disabled',
        _runs_again,
    ),
    'save_is_load': Condition(
        'with the same --save and --load',
        lambda settings: (
            settings.get('load') is not None and settings['load'] == settings.get('save')
        ),
    ),
    'not_saved': Condition('without --save', lambda settings: not settings.get('save')),
    'default_batch': Condition(
        'without --global-batch-size',
        lambda settings: (
            not settings.get(
                '_is_global_batch_size_explicitly_specified', settings.get('global_batch_size')
            )
        ),
    ),
    'evaluations': Condition(
        'with evaluations',
        lambda settings: bool(settings.get('eval_interval') and settings.get('eval_iters')),
    ),
    'cyclic_evaluations': Condition(
        'with --dataloader-type cyclic',
        lambda settings: (
            settings.get('dataloader_type') == 'cyclic' and bool(settings.get('eval_iters'))
        ),
    ),
}


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules of the file with one reason."""

    flags: str
    reason: str
    instead: str = 'leave it out'
    dest: str | None = None
    """Name of the setting, if it differs from the flag."""
    values: str = 'given'
    when: str = 'always'
    # In place of `values`:
    equal_to: str | int | None = None
    other_than: str | None = None
    above: int | None = None

    def rules(self) -> Iterator[Rule]:
        for flag in self.flags.split():
            yield Rule(
                flag=flag,
                setting=self.dest or flag.removeprefix('--').replace('-', '_'),
                reason=self.reason,
                instead=self.instead,
                values=self._excluded(),
                when=CONDITIONS[self.when],
            )

    def _excluded(self) -> Values:
        wanted, other, limit = self.equal_to, self.other_than, self.above
        if wanted is not None:
            return Values(str(wanted), lambda value: value == wanted)
        if other is not None:
            return Values(f'other than {other}', lambda value: value != other)
        if limit is not None:
            return Values(f'above {limit}', lambda value: isinstance(value, int) and value > limit)
        return VALUES[self.values]


_TABLES = msgspec.convert(
    tomllib.loads(Path(__file__).with_suffix('.toml').read_text('utf-8')), dict[str, list[_Row]]
)
REFUSED, WHOLE_JOB = (
    tuple(rule for row in _TABLES[name] for rule in row.rules())
    for name in ('refused', 'whole_job')
)
"""Rules by which a job is not started, and by which a failure restarts all workers, which recover
together from host memory."""
