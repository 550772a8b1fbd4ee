# SPDX-License-Identifier: Apache-2.0
"""Weights in fp8 whose masters Transformer Engine's Adam keeps, on the stand-ins for both.

Also with a step of recovery left out that only these need.
"""

from tests.distributed.mutations import fp8, precision
from tests.distributed.mutations.whole_job import leave_out


def masters() -> None:
    """Layers that compute in fp8, and an optimizer that keeps state of 16 and 8 bits."""
    precision.precision_aware()
    fp8.fp8()


def scales_not_restored() -> None:
    """Masters and moments are read with the scales of a fresh process."""
    masters()
    leave_out(precision.is_scale)


def scales_of_masters_not_restored() -> None:
    """Masters alone are read with the scales of a fresh process."""
    masters()
    leave_out(lambda record: precision.is_scale(record) and record.part.endswith('/master_param'))


def weight_scales_not_restored() -> None:
    """Bytes of weights are read with the scales of a fresh process."""
    masters()
    leave_out(lambda record: record.part == 'weight_scale')


def scaling_not_restored() -> None:
    """Weights are rounded by the scales of a fresh process from the next update on."""
    masters()
    leave_out(lambda record: record.part == 'scaling')


def weight_from_master() -> None:
    """Weights are rounded from the masters that are loaded, which are rounded, too."""
    precision.weight_from_master()
    fp8.fp8()
