# SPDX-License-Identifier: Apache-2.0
"""The state of delayed scaling exists before the first pass and belongs to an operator."""

from types import SimpleNamespace

import pytest
import torch

from megatron.moevement.seams import cpu_device

cpu_device.install()

from megatron.core import fp8_utils  # noqa: E402

from megatron.moevement.state import low_precision, model_operators  # noqa: E402
from tests.stand_ins import fp8_compute  # noqa: E402

RECIPE = fp8_compute.Recipe(True, fp8_compute.E5M2, amax_history_len=4)


def model(fp8: str | None, recipe: str) -> torch.nn.Module:
    chunk = torch.nn.Sequential(fp8_compute.Linear(), torch.nn.Linear(2, 2))
    chunk.config = SimpleNamespace(fp8=fp8, fp8_recipe=recipe)
    return chunk


@pytest.fixture(autouse=True)
def context(monkeypatch: pytest.MonkeyPatch) -> None:
    made = lambda config: fp8_compute.autocast(RECIPE, None)  # noqa: E731
    monkeypatch.setattr(fp8_utils, 'get_fp8_context', made)


def test_scaling_is_created_for_all_modules_that_have_it() -> None:
    chunk = model('hybrid', 'delayed')
    assert dict(low_precision.scaling_of(chunk)) == {}
    low_precision.create_scaling([chunk])
    found = {name: tuple(state.shape) for name, state in low_precision.scaling_of(chunk)}
    assert found == {
        '0.scaling_fwd.scale': (3,),
        '0.scaling_fwd.amax_history': (4, 3),
        '0.scaling_bwd.scale': (2,),
        '0.scaling_bwd.amax_history': (4, 2),
    }


@pytest.mark.parametrize(('fp8', 'recipe'), [(None, 'delayed'), ('hybrid', 'tensorwise')])
def test_scaling_is_created_for_delayed_recipes_only(fp8: str | None, recipe: str) -> None:
    chunk = model(fp8, recipe)
    low_precision.create_scaling([chunk])
    assert dict(low_precision.scaling_of(chunk)) == {}


@pytest.mark.parametrize(
    ('path', 'owner'),
    [
        ('self_attention.linear_qkv', 'layer2.rest'),
        ('mlp.experts.local_experts.1.linear_fc1', 'layer2.expert5'),
        ('mlp.experts.linear_fc1', 'layer2.rest'),
    ],
)
def test_scaling_shared_by_experts_belongs_to_the_rest(path: str, owner: str) -> None:
    mlp = SimpleNamespace(local_expert_indices=[4, 5])
    layers = {'decoder.layers.1.': model_operators._Layer('layer2', SimpleNamespace(mlp=mlp))}
    name = f'decoder.layers.1.{path}.scaling_fwd.scale'
    assert model_operators._owner_of_scaling(name, layers).name == owner
