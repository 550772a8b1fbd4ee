# SPDX-License-Identifier: Apache-2.0
"""Where upstream's precision-aware optimizer cannot be had, or would not do what it says.

Settings have the names of types as the user writes them, or types of torch once upstream has
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
    """True if the Adam that upstream would take is not that of Transformer Engine."""
    from megatron.core import optimizer

    return 'master_weight_dtype' not in inspect.signature(optimizer.Adam).parameters


def _megatron_holds_masters(settings: Settings) -> bool:
    """Upstream's own rule: else the optimizer does, and writes the weights itself."""
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
    """True if upstream would go on in 16 bits: it has not found Transformer Engine."""
    from megatron.core import fp8_utils

    return not hasattr(fp8_utils, 'TEDelayedScaling')


def _delayed(settings: Settings) -> bool:
    computes = bool(settings.get('fp8'))
    return computes and settings.get('fp8_recipe') == 'delayed'


def _delayed_in_parts(settings: Settings) -> bool:
    """A rank computes in several parts, the modules of each in a context of their own."""
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
    """Upstream has weights in fp8 beside narrow masters with delayed scaling, and only there.

    Then Adam keeps the masters, of fp32 ones 16 bits beside a weight of 16; else Megatron keeps
    them, in fp32, and gives an Adam that is to keep them no view of the weights.
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
    """True if updates that are too small for 8 bits are lost."""
    return str(settings.get('main_params_dtype')) in FP8


def leaves_scales_of_others(settings: Settings) -> bool:
    """True if upstream may leave the scale of a weight as it was where a rank has no part of it.

    Its fp8 update writes those of the weights it is given, of which each rank has some.
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
    'with --fp8-param-gather, --use-precision-aware-optimizer and an --fp8-recipe that it does '
    'not go with', _masters_against_recipe,
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
