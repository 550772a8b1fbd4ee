# SPDX-License-Identifier: Apache-2.0
"""Weights in fp8 whose masters Transformer Engine's Adam keeps, on the stand-ins for both.

Also with a step of recovery left out that only these need.
"""

from typing import Any

from megatron.moevement.state import slices
from tests.distributed.mutations import fp8, precision


def masters() -> None:
    """Layers that compute in fp8, and an optimizer that keeps state of 16 and 8 bits."""
    precision.precision_aware()
    fp8.fp8()


def scales_not_restored() -> None:
    """Masters and moments are read with the scales of a fresh process."""
    masters()
    slices.SlotLoader.restore_scale = lambda *args: None


def scales_of_masters_not_restored() -> None:
    """Masters alone are read with the scales of a fresh process."""
    masters()
    restore = slices.SlotLoader.restore_scale

    def restore_others(self: Any, record: Any, content: Any) -> None:
        if not record.part.endswith('/master_param'):
            restore(self, record, content)

    slices.SlotLoader.restore_scale = restore_others


def weight_scales_not_restored() -> None:
    """Bytes of weights are read with the scales of a fresh process."""
    masters()
    slices.SlotLoader.restore_weight_scale = lambda *args: None


def scaling_not_restored() -> None:
    """Weights are rounded by the scales of a fresh process from the next update on."""
    masters()
    slices.SlotLoader.restore_scaling = lambda *args: None


def weight_from_master() -> None:
    """Weights are rounded from the masters that are loaded, which are rounded, too."""
    precision.weight_from_master()
    fp8.fp8()
