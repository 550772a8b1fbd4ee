# SPDX-License-Identifier: Apache-2.0
"""The layers that compute in fp8 on the CPU have the rules that the adapter relies on."""

import pytest
import torch

from megatron.moevement.seams import cpu_device

cpu_device.install()

from tests.stand_ins import fp8_compute, scaling_rules  # noqa: E402

FP32 = torch.float32
DELAYED = fp8_compute.Recipe(True, fp8_compute.E5M2, 1, 4, 'max')


def test_delayed_scaling_keeps_what_passes_and_evaluations_leave() -> None:
    facts = scaling_rules.facts_of_scaling(
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
