# SPDX-License-Identifier: Apache-2.0
"""Where upstream's precision-aware optimizer cannot be had, or would not do what it says.

Settings have the names of types as the user writes them, or types of torch once upstream has
validated them.
"""

import inspect

from megatron.moevement.job.compatibility.rule import Condition, Values

_FP32 = ('fp32', 'torch.float32')
FP8 = ('fp8', 'torch.uint8')
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
    return _delayed(settings) and (chunks > 1 or bool(getattr(settings, 'mtp_num_layers', None)))


def _delayed_evaluations(settings: object) -> bool:
    return _delayed(settings) and bool(getattr(settings, 'eval_interval', None))


def _scales_lost(settings: object) -> bool:
    dense = getattr(settings, 'save', None) or getattr(settings, 'load', None)
    return bool(dense) and _megatron_holds_masters(settings)


def _is_precision_aware(settings: object) -> bool:
    return bool(getattr(settings, 'use_precision_aware_optimizer', False))


def _fp32_masters_in_adam(settings: object) -> bool:
    """Upstream has Adam keep fp32 masters, of which it keeps 16 bits beside a weight of 16."""
    main = str(getattr(settings, 'main_params_dtype', _FP32[0]))
    return (
        _is_precision_aware(settings)
        and getattr(settings, 'fp8_recipe', None) == 'delayed'
        and main in _FP32
    )


def _narrow_masters_by_other_scales(settings: object) -> bool:
    """Upstream has Adam keep the masters of weights that it gives it no view of."""
    main = str(getattr(settings, 'main_params_dtype', _FP32[0]))
    return (
        _is_precision_aware(settings)
        and getattr(settings, 'fp8_recipe', None) in ('tensorwise', 'blockwise')
        and main not in _FP32
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
    'with --fp8-recipe other than delayed, tensorwise and blockwise',
    lambda settings: getattr(settings, 'fp8_recipe', None)
    not in ('delayed', 'tensorwise', 'blockwise'),
)
FP32_MASTERS_IN_ADAM = Condition(
    'with --fp8-recipe delayed, --use-precision-aware-optimizer and fp32 masters',
    _fp32_masters_in_adam,
)
NARROW_MASTERS_BY_OTHER_SCALES = Condition(
    'with --fp8-recipe other than delayed and --main-params-dtype other than fp32',
    _narrow_masters_by_other_scales,
)
WITHOUT_ENGINE = Condition('without Transformer Engine', _lacks_engine)
DELAYED_IN_PARTS = Condition(
    'with --fp8-format and interleaved stages or --mtp-num-layers', _delayed_in_parts
)
DELAYED_EVALUATIONS = Condition('with --fp8-recipe delayed', _delayed_evaluations)
WITHOUT_ADAM = Condition('without Transformer Engine', _lacks_adam)
GRADIENTS_IN_FP16 = Condition('with --use-precision-aware-optimizer', _fp16_gradients)
SCALES_LOST = Condition('with --fp8-recipe other than delayed and dense checkpoints', _scales_lost)
SCALED = Values('fp16 or fp8', lambda value: str(value) in _SCALED)
