# SPDX-License-Identifier: Apache-2.0
"""The layers that compute in fp8 on the CPU have the rules that the adapter relies on."""

import torch

from megatron.moevement.seams import cpu_device

cpu_device.install()

from tests.stand_ins import fp8_compute, fp8_weights, rules  # noqa: E402
from tests.stand_ins.fused_adam import FusedAdam  # noqa: E402

FP32 = torch.float32
DELAYED = fp8_compute.Recipe(True, fp8_compute.E5M2, 1, 4, 'max')


def test_delayed_scaling_keeps_the_state_after_passes_and_evaluations() -> None:
    facts = rules.facts_of_scaling(
        fp8_compute.Linear(), lambda: fp8_compute.autocast(DELAYED, None), 'cpu'
    )
    assert facts.state == {
        '0.scaling_fwd.scale': (FP32, (3,)),
        '0.scaling_fwd.amax_history': (FP32, (4, 3)),
        '0.scaling_bwd.scale': (FP32, (2,)),
        '0.scaling_bwd.amax_history': (FP32, (4, 2)),
    }
    assert facts.created_early and facts.in_place and facts.emptied
    assert facts.left_by_evaluation == [fp8_compute.INPUT, fp8_compute.WEIGHT]


def test_update_of_a_weight_in_fp8_rounds_by_the_scale_of_its_module() -> None:
    """Only the part that it is given; the largest value is noted for the next scale."""
    facts = rules.facts_of_fp8_update(FusedAdam, fp8_weights.delayed_weight, 'cpu')
    assert facts.shared and facts.amax_is_of_update
    assert 16 <= facts.written[0] < facts.written[1] <= 47
    assert facts.scale_inv == 1 / (2 * rules.SCALE)
