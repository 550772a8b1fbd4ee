# SPDX-License-Identifier: Apache-2.0
"""Masters in fp8: Transformer Engine's Adam could keep them, but its constructor refuses to.

Upstream's `--main-params-dtype` has no name for them, so a flag of this package asks for them. An
update is computed in fp32, as with any other master, and what is too small to change a number of 8
bits is lost.

Checked against megatron-core 0.19.2 and, by reading, Transformer Engine 2.1 to 2.18, 2.20.
"""

import functools

import torch

from megatron.moevement.facts import Settings, UpstreamArguments
from megatron.moevement.seams import patches
from moevement_ext.config import ConfigurationError

FP8 = torch.uint8
"""How upstream writes the type of what is kept in fp8."""
_LARGEST = 448.0  # of the format e4m3


def take_place(args: UpstreamArguments) -> None:
    """Put them in the place of fp16 masters, if the command line asks for that.

    Args:
        args: upstream's arguments, parsed and validated.

    Raises:
        ConfigurationError: there are no fp16 masters.
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
    """Have upstream build its optimizer with such masters, if the settings ask for them.

    Raises:
        InstallationError: upstream has no Adam of Transformer Engine.
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
            # State is made later, in the form that is noted here.
            super().__init__(*args, master_weight_dtype=torch.float16, **settings)
            self.master_weight_dtype = master_weight_dtype
            self.name_to_dtype_map['master_param'] = master_weight_dtype

        def _apply_scale(
            self, name: str, unscaled: torch.Tensor, scaled: torch.Tensor, scale: torch.Tensor
        ) -> None:
            """Round a state into the form it is kept in, in place.

            Of one that is all zero, as a bias is at first, the largest value gives no scale: the
            class above would divide by it, and the state would be lost as NaN.
            """
            if not hasattr(scaled, '_quantizer'):
                super()._apply_scale(name, unscaled, scaled, scale)
                return
            scale.copy_(unscaled.abs().amax() / _LARGEST)
            scaled._quantizer.scale.copy_(torch.where(scale > 0, scale.reciprocal(), 1.0))
            scaled.copy_(unscaled)

    return FusedAdamWithFp8Masters
