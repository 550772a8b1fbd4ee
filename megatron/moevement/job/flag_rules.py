# SPDX-License-Identifier: Apache-2.0
"""What a rule about flags consists of: values of its flag, and conditions on other flags.

A custom loop has no settings for features that only upstream's trainer has. Settings hold data
types by name, as the user writes them, or as torch types once upstream has validated them.
"""

import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

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


GIVEN = Values('', bool)
"""All values that are true in Python."""
ANY = Values('', lambda value: True)
"""All values, also zero and an empty text."""


def other_than(*names: str) -> Values:
    """All values except `names`."""
    return Values(f'other than {" and ".join(names)}', lambda value: value not in names)


def equal_to(wanted: str | int) -> Values:
    """One value."""
    return Values(str(wanted), lambda value: value == wanted)


def above(limit: int) -> Values:
    """Numbers above `limit`."""
    return Values(f'above {limit}', lambda value: isinstance(value, int) and value > limit)


@dataclass(frozen=True)
class Condition:
    """A condition on other flags, in addition to the value of the rule's flag."""

    words: str
    """Shown after the flag and its values in a table or message."""
    holds: Callable[[Settings], bool]


ALWAYS = Condition('', lambda settings: True)


def having(words: str, setting: str, *values: object) -> Condition:
    """A setting has one of `values`; without values: it is true in Python."""
    return Condition(
        words,
        lambda settings: settings.get(setting) in values if values else bool(settings.get(setting)),
    )


@dataclass(frozen=True)
class Rule:
    """Some values of a flag exclude a kind of recovery."""

    flag: str
    """The flag as the user writes it, with dashes."""
    reason: str
    """Cause of the exclusion, as a clause without a full stop."""
    _: KW_ONLY
    values: Values = GIVEN
    when: Condition = ALWAYS
    instead: str = 'leave it out'
    """What to do, as a command."""
    dest: str | None = None
    """Name of the setting, if it differs from the flag."""

    @property
    def setting(self) -> str:
        """Name of the setting that the rule reads."""
        return self.dest or self.flag.removeprefix('--').replace('-', '_')

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


SCALED = Values('fp16 or fp8', lambda value: str(value) in _SCALED)
WITHOUT_ADAM = Condition('without Transformer Engine', _lacks_adam)
WITHOUT_ENGINE = Condition('without Transformer Engine', _lacks_engine)
FP16_GRADIENTS = Condition('with --use-precision-aware-optimizer', _has_fp16_gradients)
SCALES_LOST = Condition(
    'with --fp8-recipe other than delayed and dense checkpoints',
    lambda settings: (
        bool(settings.get('save') or settings.get('load')) and _megatron_holds_masters(settings)
    ),
)
UNTRIED_WEIGHTS = Condition(
    'with --fp8-recipe other than delayed, tensorwise and blockwise',
    lambda settings: settings.get('fp8_recipe') not in _RECIPES_OF_WEIGHTS,
)
MASTERS_AGAINST_RECIPE = Condition(
    'with --fp8-param-gather, --use-precision-aware-optimizer and an --fp8-recipe that does not '
    'support it',
    _masters_against_recipe,
)
DELAYED_IN_PARTS = Condition(
    'with --fp8-format and interleaved stages, --mtp-num-layers or --cuda-graph-impl',
    _delayed_in_parts,
)
DELAYED_EVALUATIONS = Condition(
    'with --fp8-recipe delayed',
    lambda settings: _delayed(settings) and bool(settings.get('eval_interval')),
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


def _runs_again(settings: Settings) -> bool:
    checks = ('check_for_large_grads', 'check_for_spiky_loss')
    return VALIDATED.holds(settings) and any(settings.get(name) for name in checks)


def more_shards_than(ranks: str, shards: str) -> Condition:
    """A weight has more shards than ranks that compute with a part of it."""
    return Condition(
        'above the tensor-parallel size',
        lambda settings: number(settings, shards, 1) > number(settings, ranks, 1),
    )


NEITHER_ADAM_NOR_MUON = Values(
    'other than adam, and than muon with --muon-scalar-optimizer adam and without '
    '--use-distributed-optimizer',
    lambda value: value != 'adam',
)
NOT_REPLICATED_MUON = Condition('', _is_not_replicated_muon)
BALANCES_QUANTILES = Values(
    'with quantile_balancing',
    lambda kinds: 'quantile_balancing' in (kinds if isinstance(kinds, list) else [kinds]),
)
PREDICTS_EARLY = Values(
    'with m before the last stage', lambda value: 'm' in str(value).rpartition('|')[0]
)
TRUE = Values('', lambda value: value is True)
VALIDATED = having('without --rerun-mode disabled', 'rerun_mode', 'validate_results')
RERUNS = Condition(
    'with --check-for-large-grads or --check-for-spiky-loss, without --rerun-mode disabled',
    _runs_again,
)
SAVE_IS_LOAD = Condition(
    'with the same --save and --load',
    lambda settings: settings.get('load') is not None and settings['load'] == settings.get('save'),
)
NOT_SAVED = Condition('without --save', lambda settings: not settings.get('save'))
DEFAULT_BATCH = Condition(
    'without --global-batch-size',
    lambda settings: (
        not settings.get(
            '_is_global_batch_size_explicitly_specified', settings.get('global_batch_size')
        )
    ),
)
EVALUATIONS = Condition(
    'with evaluations',
    lambda settings: bool(settings.get('eval_interval') and settings.get('eval_iters')),
)
CYCLIC_EVALUATIONS = Condition(
    'with --dataloader-type cyclic',
    lambda settings: (
        settings.get('dataloader_type') == 'cyclic' and bool(settings.get('eval_iters'))
    ),
)
