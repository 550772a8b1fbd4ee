# SPDX-License-Identifier: Apache-2.0
"""Two changes of Adam: dense checkpoints that load on any device, and masters in fp8.

In fp32 upstream's distributed optimizer loads a dense checkpoint by copies into views of the
weights themselves, which torch refuses outside of `no_grad`.

Torch's own Adam, which upstream uses without Transformer Engine and Apex, keeps a step for each
parameter. Upstream describes no steps of parameters that had no gradient yet, and loads one tensor
for all parameters: each parameter's update would then advance the step of all others.

Masters in fp8 are supported by the step of Transformer Engine's Adam, but not by its constructor,
and upstream's `--main-params-dtype` has no name for them, so a flag of this package selects them.
An update is computed in fp32, as with any other master; a change too small for 8 bits is lost.
Checked, by reading, against Transformer Engine 2.1 to 2.18, 2.20.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron.moevement.facts import MegatronOptimizer, Settings, UpstreamArguments
from megatron.moevement.seams import patches
from moevement_ext.config import ConfigurationError

_DISTRIBUTED_OPTIMIZER = 'megatron.core.optimizer.distrib_optimizer:DistributedOptimizer'


@functools.cache
def repair_loading() -> None:
    """Make dense checkpoints load on any device. Call after megatron imports.

    With Transformer Engine or Apex steps are left alone: their Adam keeps one step per group.
    """
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    set_states = f'{_DISTRIBUTED_OPTIMIZER}._set_main_param_and_optimizer_states'
    patches.wrap(set_states, torch.no_grad()(lambda original, *args: original(*args)))
    if not HAVE_APEX_OR_TE:
        patches.wrap(f'{_DISTRIBUTED_OPTIMIZER}.sharded_state_dict', _describe_allocated)
        patches.wrap(f'{_DISTRIBUTED_OPTIMIZER}.load_state_dict', _load_with_own_steps)
        patches.wrap(set_states, _set_without_step)


def _describe_allocated(
    describe: Callable[..., object], optimizer: MegatronOptimizer, *args: object, **kwargs: object
) -> object:
    if isinstance(optimizer.optimizer, torch.optim.Adam):
        for group in optimizer.optimizer.param_groups:
            for parameter in group['params']:
                _ensure_adam_state(optimizer.optimizer.state[parameter], parameter)
    return describe(optimizer, *args, **kwargs)


def _load_with_own_steps(
    load: Callable[..., object], optimizer: MegatronOptimizer, state_dict: dict[str, Any]
) -> None:
    load(optimizer, state_dict)
    if isinstance(optimizer.optimizer, torch.optim.Adam):
        step = float(state_dict['optimizer']['param_groups'][0]['step'])
        for state in optimizer.optimizer.state.values():
            state['step'] = torch.tensor(step)


def _set_without_step(
    set_states: Callable[..., None],
    optimizer: MegatronOptimizer,
    parameter: torch.nn.Parameter,
    tensors: dict[str, object],
) -> None:
    """Pass a step of None, which upstream does not set: reshardable checkpoints have no steps."""
    set_states(optimizer, parameter, {'step': None, **tensors})


def _ensure_adam_state(state: dict[str, torch.Tensor], parameter: torch.Tensor) -> None:
    if not state:
        state['step'] = torch.tensor(0.0)
        state['exp_avg'] = torch.zeros_like(parameter.data)
        state['exp_avg_sq'] = torch.zeros_like(parameter.data)


FP8 = torch.uint8
"""Upstream's notation of the fp8 data type."""
_LARGEST = 448.0  # largest number of the format e4m3


def choose_fp8_masters(args: UpstreamArguments) -> None:
    """Turn fp16 masters into fp8 masters if the command line asks for them.

    Raises:
        ConfigurationError: masters are not fp16.
    """
    if not args.sparse_ckpt_fp8_masters:
        return
    if not args.use_precision_aware_optimizer or args.main_params_dtype != torch.float16:
        raise ConfigurationError(
            '--sparse-ckpt-fp8-masters takes the place of fp16 masters: add '
            '--use-precision-aware-optimizer --main-params-dtype fp16'
        )
    args.main_params_dtype = FP8


def install_fp8_masters(settings: Settings) -> None:
    """Make upstream build its optimizer with fp8 masters, if the settings ask for them.

    Raises:
        UserError: upstream has no Adam of Transformer Engine.
    """
    if settings.get('main_params_dtype') == FP8:
        _install()


@functools.cache
def _install() -> None:
    patches.wrap('megatron.core.optimizer:Adam', _build)


def _build(adam: type, *args: object, **settings: object) -> object:
    kind = keeping(adam) if settings.get('master_weight_dtype') == FP8 else adam
    return kind(*args, **settings)


@functools.cache
def keeping(adam: type) -> type:
    """A subclass of Transformer Engine's FusedAdam that keeps its masters in fp8."""

    class FusedAdamWithFp8Masters(adam):  # type: ignore[misc]
        def __init__(
            self, *args: object, master_weight_dtype: torch.dtype, **settings: object
        ) -> None:
            # State is created later, in the data type that is recorded here.
            super().__init__(*args, master_weight_dtype=torch.float16, **settings)
            self.master_weight_dtype = master_weight_dtype
            self.name_to_dtype_map['master_param'] = master_weight_dtype

        def _apply_scale(
            self, name: str, unscaled: torch.Tensor, scaled: torch.Tensor, scale: torch.Tensor
        ) -> None:
            """Round a state into its stored form, in place.

            For an all-zero state (an initial bias) the largest value gives no scale: the base class
            would divide by zero, and the state would become NaN.
            """
            if not hasattr(scaled, '_quantizer'):
                super()._apply_scale(name, unscaled, scaled, scale)
                return
            scale.copy_(unscaled.abs().amax() / _LARGEST)
            scaled._quantizer.scale.copy_(torch.where(scale > 0, scale.reciprocal(), 1.0))
            scaled.copy_(unscaled)

    return FusedAdamWithFp8Masters
