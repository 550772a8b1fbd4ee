# SPDX-License-Identifier: Apache-2.0
"""Masters in fp8, which the step of Transformer Engine's Adam supports but not its constructor.

Upstream's `--main-params-dtype` has no name for fp8, so a flag of this package selects it. An
update is computed in fp32, as with any other master; a change too small for 8 bits is lost.

Checked, by reading, against Transformer Engine 2.1 to 2.18, 2.20.
"""

import functools

import torch

from megatron.moevement.facts import Settings, UpstreamArguments
from megatron.moevement.seams import patches
from moevement_ext.config import ConfigurationError

FP8 = torch.uint8
"""Upstream's notation of the fp8 data type."""
_LARGEST = 448.0  # largest number of the format e4m3


def take_place(args: UpstreamArguments) -> None:
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


def install(settings: Settings) -> None:
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
