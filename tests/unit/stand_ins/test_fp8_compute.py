# SPDX-License-Identifier: Apache-2.0
"""The layers that compute in fp8 on the CPU have the rules that the adapter relies on."""

import pytest
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


@pytest.mark.parametrize(
    ('algorithm', 'expected'), [('max', 448 / 8 / 2), ('most_recent', 448 / 4)]
)
def test_scales_follow_the_largest_values(algorithm: str, expected: float) -> None:
    recipe = DELAYED._replace(amax_compute_algo=algorithm, margin=algorithm == 'max')
    state = fp8_compute.DelayedScaling(recipe, 2)
    state.amax_history[0] = torch.tensor([8.0, 0.0])
    state.update(recipe, 448.0)
    state.amax_history[0] = torch.tensor([4.0, torch.inf])
    state.update(recipe, 448.0)
    assert state.scale.tolist() == [expected, 1.0], 'nothing known, or no number: as it was'
    assert state.amax_history[0].tolist() == [0.0, 0.0]
    assert state.amax_history[:, 0].tolist() == [0.0, 0.0, 8.0, 4.0]


def test_update_of_a_weight_in_fp8_rounds_by_the_scale_of_its_module() -> None:
    """Only the part that it is given; the largest value is noted for the next scale."""
    facts = rules.facts_of_fp8_update(FusedAdam, fp8_weights.delayed_weight, 'cpu')
    assert facts.shared and facts.amax_is_of_update
    assert 16 <= facts.written[0] < facts.written[1] <= 47
    assert facts.scale_inv == 1 / (2 * rules.SCALE)


def test_update_of_a_weight_in_fp8_needs_masters_of_16_bits() -> None:
    """Those of 32 are kept as 16 bits beside a weight that looks like one in bf16."""
    weights, adam = rules.precise_adam(
        FusedAdam, rules.Formats(rules.FP8, FP32), 'cpu', in_fp8=fp8_weights.delayed_weight
    )
    weights[0].decoupled_grad = rules.gradient_of(0, 'cpu')
    with pytest.raises(RuntimeError, match='must be fp32'):
        adam.step()


def test_weight_of_a_layer_follows_the_scales_of_the_layer() -> None:
    """The first values are rounded by a scale of 1; the next ones by that of the passes before."""
    with fp8_compute.weights_in_fp8('delayed', DELAYED):
        layer = fp8_compute.Linear()
    state = layer.fp8_meta['scaling_fwd']
    values = torch.linspace(-3, 3, 32 * 32).view(32, 32)
    with torch.no_grad():
        layer.weight.copy_(values)
    assert layer.weight._scale_inv.tolist() == [1.0]
    assert state.amax_history[0, fp8_compute.WEIGHT] == 3.0
    with fp8_compute.autocast(DELAYED, None):
        layer(torch.ones(4, 32, dtype=torch.bfloat16, requires_grad=True)).sum()
    assert float(state.scale[fp8_compute.WEIGHT]) == pytest.approx(448 / 3 / 2)
    with torch.no_grad():
        layer.weight.copy_(values)
    torch.testing.assert_close(layer.weight._scale_inv, torch.tensor([2 * 3 / 448]))
    torch.testing.assert_close(layer.weight.float(), values, rtol=0.07, atol=1e-3)
