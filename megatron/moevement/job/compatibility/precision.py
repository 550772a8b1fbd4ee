# SPDX-License-Identifier: Apache-2.0
"""Cases where upstream's precision-aware optimizer is unavailable, or deviates from its flags.

Settings hold data types by name, as the user writes them, or as torch types once upstream has
validated them.
"""

import inspect

from megatron.moevement.facts import Settings
from megatron.moevement.job.compatibility.rule import Condition, Values, number

_FP32 = ('fp32', 'torch.float32')
FP8 = ('fp8', 'torch.uint8')
_RECIPES_OF_WEIGHTS = ('delayed', 'tensorwise', 'blockwise')
_SCALED = ('fp16', 'torch.float16', *FP8)


def _lacks_adam(settings: Settings) -> bool:
    """True if upstream's Adam is not the Adam of Transformer Engine."""
    from megatron.core import optimizer

    return 'master_weight_dtype' not in inspect.signature(optimizer.Adam).parameters


def _megatron_holds_masters(settings: Settings) -> bool:
    """Upstream's rule. If False, the optimizer holds the masters and writes the weights itself."""
    recipe = settings.get('fp8_recipe')
    main = str(settings.get('main_params_dtype', _FP32[0]))
    return recipe not in (None, 'delayed') and main in _FP32


def _fp16_gradients(settings: Settings) -> bool:
    in_fp32 = ('accumulate_allreduce_grads_in_fp32', 'grad_reduce_in_fp32')
    return (
        bool(settings.get('use_precision_aware_optimizer'))
        and not _megatron_holds_masters(settings)
        and not any(settings.get(name) for name in in_fp32)
        and bool(settings.get('clip_grad'))
    )


def _lacks_engine(settings: Settings) -> bool:
    """True if upstream found no Transformer Engine, and silently continues in 16 bits."""
    from megatron.core import fp8_utils

    return not hasattr(fp8_utils, 'TEDelayedScaling')


def _delayed(settings: Settings) -> bool:
    computes = bool(settings.get('fp8'))
    return computes and settings.get('fp8_recipe') == 'delayed'


def _delayed_in_parts(settings: Settings) -> bool:
    """True if a rank computes in several parts, each with its own fp8 context for its modules."""
    chunks = number(settings, 'virtual_pipeline_model_parallel_size', 1)
    recorded = settings.get('cuda_graph_impl') not in (None, 'none')
    several = chunks > 1 or bool(settings.get('mtp_num_layers')) or recorded
    return _delayed(settings) and several


def _delayed_evaluations(settings: Settings) -> bool:
    return _delayed(settings) and bool(settings.get('eval_interval'))


def _scales_lost(settings: Settings) -> bool:
    dense = settings.get('save') or settings.get('load')
    return bool(dense) and _megatron_holds_masters(settings)


def _is_precision_aware(settings: Settings) -> bool:
    return bool(settings.get('use_precision_aware_optimizer'))


def _masters_against_recipe(settings: Settings) -> bool:
    """True if `--main-params-dtype` does not suit `--fp8-recipe` for weights in fp8.

    With delayed scaling upstream supports fp8 weights only with narrow masters: Adam keeps the
    masters, and stores fp32 masters as 16 bits in addition to a 16-bit weight. With other recipes
    Megatron keeps fp32 masters; an Adam configured to keep them gets no view of the weights.
    """
    fp32 = str(settings.get('main_params_dtype', _FP32[0])) in _FP32
    recipe = settings.get('fp8_recipe')
    return (
        bool(settings.get('fp8_param_gather'))
        and _is_precision_aware(settings)
        and recipe in _RECIPES_OF_WEIGHTS
        and fp32 == (recipe == 'delayed')
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
        and _is_precision_aware(settings)
        and bool(settings.get('fp8_param_gather'))
        and number(settings, 'data_parallel_size', 1) > 1
    )


UNTRIED_WEIGHTS = Condition(
    f'with --fp8-recipe other than {", ".join(_RECIPES_OF_WEIGHTS[:-1])} and '
    f'{_RECIPES_OF_WEIGHTS[-1]}',
    lambda settings: settings.get('fp8_recipe') not in _RECIPES_OF_WEIGHTS,
)
MASTERS_AGAINST_RECIPE = Condition(
    'with --fp8-param-gather, --use-precision-aware-optimizer and an --fp8-recipe that does not '
    'support it', _masters_against_recipe,
)  # fmt: skip
WITHOUT_ENGINE = Condition('without Transformer Engine', _lacks_engine)
DELAYED_IN_PARTS = Condition(
    'with --fp8-format and interleaved stages, --mtp-num-layers or --cuda-graph-impl',
    _delayed_in_parts,
)
DELAYED_EVALUATIONS = Condition('with --fp8-recipe delayed', _delayed_evaluations)
WITHOUT_ADAM = Condition('without Transformer Engine', _lacks_adam)
GRADIENTS_IN_FP16 = Condition('with --use-precision-aware-optimizer', _fp16_gradients)
SCALES_LOST = Condition('with --fp8-recipe other than delayed and dense checkpoints', _scales_lost)
SCALED = Values('fp16 or fp8', lambda value: str(value) in _SCALED)
