# SPDX-License-Identifier: Apache-2.0
"""Where upstream's precision-aware optimizer cannot be had, or would not do what it says.

Settings have the names of types as the user writes them, or types of torch once upstream has
validated them.
"""

import inspect

from megatron.moevement.job.compatibility.rule import Condition, Values

_FP32 = ('fp32', 'torch.float32')
FP8 = ('fp8', 'torch.uint8')
_RECIPES_OF_WEIGHTS = ('delayed', 'tensorwise', 'blockwise')
_SCALED = ('fp16', 'torch.float16', *FP8)


def _lacks_adam(settings: object) -> bool:
    """True if the Adam that upstream would take is not that of Transformer Engine."""
    from megatron.core import optimizer

    return 'master_weight_dtype' not in inspect.signature(optimizer.Adam).parameters


def _megatron_holds_masters(settings: object) -> bool:
    """Upstream's own rule: else the optimizer does, and writes the weights itself."""
    recipe = getattr(settings, 'fp8_recipe', None)
    main = str(getattr(settings, 'main_params_dtype', _FP32[0]))
    return recipe not in (None, 'delayed') and main in _FP32


def _fp16_gradients(settings: object) -> bool:
    in_fp32 = ('accumulate_allreduce_grads_in_fp32', 'grad_reduce_in_fp32')
    return (
        bool(getattr(settings, 'use_precision_aware_optimizer', False))
        and not _megatron_holds_masters(settings)
        and not any(getattr(settings, name, False) for name in in_fp32)
        and bool(getattr(settings, 'clip_grad', 0.0))
    )


def _lacks_engine(settings: object) -> bool:
    """True if upstream would go on in 16 bits: it has not found Transformer Engine."""
    from megatron.core import fp8_utils

    return not hasattr(fp8_utils, 'TEDelayedScaling')


def _delayed(settings: object) -> bool:
    computes = bool(getattr(settings, 'fp8', None))
    return computes and getattr(settings, 'fp8_recipe', None) == 'delayed'


def _delayed_in_parts(settings: object) -> bool:
    """A rank computes in several parts, the modules of each in a context of their own."""
    chunks = getattr(settings, 'virtual_pipeline_model_parallel_size', None) or 1
    recorded = getattr(settings, 'cuda_graph_impl', None) not in (None, 'none')
    several = chunks > 1 or bool(getattr(settings, 'mtp_num_layers', None)) or recorded
    return _delayed(settings) and several


def _delayed_evaluations(settings: object) -> bool:
    return _delayed(settings) and bool(getattr(settings, 'eval_interval', None))


def _scales_lost(settings: object) -> bool:
    dense = getattr(settings, 'save', None) or getattr(settings, 'load', None)
    return bool(dense) and _megatron_holds_masters(settings)


def _is_precision_aware(settings: object) -> bool:
    return bool(getattr(settings, 'use_precision_aware_optimizer', False))


def _masters_against_recipe(settings: object) -> bool:
    """Upstream has weights in fp8 beside narrow masters with delayed scaling, and only there.

    Then Adam keeps the masters, of fp32 ones 16 bits beside a weight of 16; else Megatron keeps
    them, in fp32, and gives an Adam that is to keep them no view of the weights.
    """
    fp32 = str(getattr(settings, 'main_params_dtype', _FP32[0])) in _FP32
    recipe = getattr(settings, 'fp8_recipe', None)
    return (
        bool(getattr(settings, 'fp8_param_gather', False))
        and _is_precision_aware(settings)
        and recipe in _RECIPES_OF_WEIGHTS
        and fp32 == (recipe == 'delayed')
    )


def keeps_fp8_masters(settings: object) -> bool:
    """True if updates that are too small for 8 bits are lost."""
    return str(getattr(settings, 'main_params_dtype', None)) in FP8


def leaves_scales_of_others(settings: object) -> bool:
    """True if upstream may leave the scale of a weight as it was where a rank has no part of it.

    Its fp8 update writes those of the weights it is given, of which each rank has some.
    """
    return (
        _delayed(settings)
        and _is_precision_aware(settings)
        and bool(getattr(settings, 'fp8_param_gather', False))
        and int(getattr(settings, 'data_parallel_size', None) or 1) > 1
    )


UNTRIED_WEIGHTS = Condition(
    f'with --fp8-recipe other than {", ".join(_RECIPES_OF_WEIGHTS[:-1])} and '
    f'{_RECIPES_OF_WEIGHTS[-1]}',
    lambda settings: getattr(settings, 'fp8_recipe', None) not in _RECIPES_OF_WEIGHTS,
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
