# SPDX-License-Identifier: Apache-2.0
"""Upstream's layers on the stand-ins that compute in fp8.

Also with a step of recovery left out that only these need.
"""

from typing import Any

from megatron.moevement.state import broken_iteration, training_state
from moevement_ext.capture.layout import OperatorSlices
from tests.distributed.mutations.whole_job import leave_out
from tests.stand_ins import fp8_compute


def fp8() -> None:
    """Layers compute in fp8."""
    fp8_compute.layers_compute_in_fp8()


def scaling_not_restored() -> None:
    """Scales and amax histories are those of a fresh process."""
    fp8()
    leave_out(lambda record: record.part == 'scaling')


def scaling_captured_once() -> None:
    """The state of the scales is captured with the operator alone, as buffers are."""
    fp8()
    build = training_state._slices

    def with_the_operator(*args: Any) -> OperatorSlices:
        full, weights, always = build(*args)
        return OperatorSlices((*full, *always), (*weights, *always))

    training_state._slices = with_the_operator


def scaling_not_rolled_back() -> None:
    """What is cut off leaves its largest values, and scales that were worked out from them."""
    fp8()
    begin = broken_iteration.BrokenIteration.__init__

    def without_scaling(self: Any, model: Any, operators: Any) -> None:
        saved = {name: operator.scaling for name, operator in operators.items()}
        for operator in operators.values():
            operator.scaling = {}
        begin(self, model, operators)
        for name, operator in operators.items():
            operator.scaling = saved[name]

    broken_iteration.BrokenIteration.__init__ = without_scaling


def weight_scales_not_restored() -> None:
    """Bytes of weights in fp8 are read with the scales of a fresh process."""
    fp8()
    leave_out(lambda record: record.part == 'weight_scale')


def weights_from_masters() -> None:
    """Frozen ones have no master that is theirs; the update makes others of them."""
    fp8()
    leave_out(lambda record: record.part == 'weight' and record.dtype == 'uint8')
