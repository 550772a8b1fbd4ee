# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine itself has the rules that its stand-ins on the CPU have: its kernels.

What shows without them is in `tests/transformer_engine`.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megatron.moevement.state import low_precision
from tests.stand_ins import rules
from tests.stand_ins.fused_adam import FusedAdam, OlderFusedAdam
from tests.stand_ins.one_rank import check_restored
from tests.stand_ins.random_states import GeneratorsTracker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.transformer_engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
    pytest.mark.skipif(
        importlib.util.find_spec('transformer_engine') is None, reason='needs Transformer Engine'
    ),
]

CLOSE = {'rtol': 1e-5, 'atol': 1e-6}
"""Kernels add up in another order."""
CLOSE_IN_FP8 = {'rtol': 1e-1, 'atol': 1e-2}


@pytest.fixture
def real() -> Any:
    import transformer_engine.pytorch as te

    return te


@pytest.mark.parametrize('adam_w_mode', [True, False])
def test_adam_has_the_same_state_and_rules(real: Any, adam_w_mode: bool) -> None:
    found = rules.facts_of_adam(real.optimizers.FusedAdam, 'cuda', adam_w_mode)
    kinds = (FusedAdam, OlderFusedAdam)
    expected = [rules.facts_of_adam(kind, 'cpu', adam_w_mode) for kind in kinds]
    assert found.steps in [one.steps for one in expected]
    assert all(type(step) in (int, type(None)) for step in found.steps)
    assert found._replace(values={}, steps=[]) == expected[0]._replace(values={}, steps=[])
    torch.testing.assert_close(found.values, expected[0].values, **CLOSE)


@pytest.mark.parametrize('name', rules.FORMATS)
def test_adam_keeps_low_precision_state_in_the_same_form(real: Any, name: str) -> None:
    """Also where the product looks for bits and scales, which stay in their place."""
    formats = rules.FORMATS[name]
    found = rules.facts_of_precision(real.optimizers.FusedAdam, formats, 'cuda')
    expected = rules.facts_of_precision(FusedAdam, formats, 'cpu')
    assert found._replace(values={}) == expected._replace(values={})
    rounded = rules.FP8 in formats
    torch.testing.assert_close(
        found.values['weight'], expected.values['weight'], **(CLOSE_IN_FP8 if rounded else CLOSE)
    )


@pytest.fixture
def in_fp8() -> rules.WeightKind:
    """Makes weights as a layer with delayed scaling does."""
    import transformer_engine_torch
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    e4m3 = transformer_engine_torch.DType.kFloat8E4M3

    def make(values: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        quantizer = Float8Quantizer(scale=scale, amax=amax, fp8_dtype=e4m3, columnwise=False)
        return quantizer(values.bfloat16())

    return make


def test_adam_writes_weights_in_fp8_by_the_same_rules(real: Any, in_fp8: rules.WeightKind) -> None:
    from tests.stand_ins.fp8_weights import delayed_weight

    found = rules.facts_of_fp8_update(real.optimizers.FusedAdam, in_fp8, 'cuda')
    assert found == rules.facts_of_fp8_update(FusedAdam, delayed_weight, 'cpu')


def test_adam_fails_with_fp32_masters_of_weights_in_fp8(
    real: Any, in_fp8: rules.WeightKind
) -> None:
    """As the refusal says; where it does not any more, the refusal can go."""
    formats = rules.Formats(rules.FP8, rules.FP32)
    weights, adam = rules.precise_adam(real.optimizers.FusedAdam, formats, 'cuda', in_fp8=in_fp8)
    weights[0].decoupled_grad = rules.gradient_of(0, 'cuda')
    with pytest.raises(RuntimeError):
        adam.step()


RESTORED = {
    **{name: rules.FORMATS[name] for name in ('fp8-and-fp16-moments', 'remainders')},
    **rules.FORMATS_OF_FP8_WEIGHTS,
}


@pytest.mark.parametrize('name', RESTORED)
def test_low_precision_state_is_restored_as_stored(
    real: Any, in_fp8: rules.WeightKind, name: str
) -> None:
    """Also beside weights in fp8."""
    formats = RESTORED[name]
    of_weights = in_fp8 if formats.weight == rules.FP8 else None
    check_restored(real.optimizers.FusedAdam, formats, 'cuda', in_fp8=of_weights)


@pytest.mark.parametrize('weight', [rules.BF16, rules.FP8])
def test_fp8_masters_are_captured_and_restored(
    real: Any, in_fp8: rules.WeightKind, weight: torch.dtype
) -> None:
    from megatron.moevement.seams.adam import keeping

    formats = rules.Formats(weight, rules.FP8, rules.FP8, rules.FP16)
    kind = keeping(real.optimizers.FusedAdam)
    if weight == rules.BF16:
        found = rules.facts_of_precision(kind, formats, 'cuda')
        expected = rules.facts_of_precision(keeping(FusedAdam), formats, 'cpu')
        assert found._replace(values={}) == expected._replace(values={})
    check_restored(kind, formats, 'cuda', in_fp8=in_fp8 if weight == rules.FP8 else None)


@pytest.mark.parametrize(
    ('name', 'recipe'),
    [('tensorwise', 'Float8CurrentScaling'), ('blockwise', 'Float8BlockScaling')],
)
def test_weights_in_fp8_are_held_under_the_same_names(real: Any, name: str, recipe: str) -> None:
    """Also where the product looks for bytes and scales; the transposed bytes may be missing."""
    from transformer_engine.common import recipe as recipes

    from tests.stand_ins.fp8_weights import KINDS

    with real.fp8_model_init(enabled=True, recipe=getattr(recipes, recipe)()):
        weight = real.Linear(256, 128, bias=False, params_dtype=torch.bfloat16).weight
    stand_in = KINDS[name].rounded(torch.ones(128, 256))
    assert type(weight).__name__ == type(stand_in).__name__
    assert all(hasattr(weight, attribute) for attribute in stand_in.NAMES)
    bytes_, scale = low_precision.raw(weight), low_precision.weight_scale(weight)
    assert bytes_ is getattr(weight, stand_in.NAMES[0])
    assert scale is getattr(weight, stand_in.NAMES[1])
    assert (bytes_.dtype, bytes_.shape) == (torch.uint8, weight.shape)
    assert (
        scale.dtype == torch.float32 and scale.dim() == low_precision.weight_scale(stand_in).dim()
    )
    assert weight.dtype == stand_in.dtype


def test_delayed_scaling_has_the_same_state_and_rules(real: Any) -> None:
    from transformer_engine.common.recipe import DelayedScaling, Format

    from tests.stand_ins import fp8_compute

    recipe = DelayedScaling(fp8_format=Format.HYBRID, **rules.ASKED)
    layer = real.Linear(32, 32, bias=False, params_dtype=torch.bfloat16)
    found = rules.facts_of_scaling(
        layer, lambda: real.fp8_autocast(enabled=True, fp8_recipe=recipe), 'cuda'
    )
    stand_in = fp8_compute.Recipe(True, fp8_compute.E5M2, **rules.ASKED)
    expected = rules.facts_of_scaling(
        fp8_compute.Linear(), lambda: fp8_compute.autocast(stand_in, None), 'cpu'
    )
    assert found._replace(values={}) == expected._replace(values={})
    for name, value in expected.values.items():
        used = 2 if 'fwd' in name else 1  # columns; no reader uses the others
        torch.testing.assert_close(
            found.values[name][..., :used], value[..., :used], **CLOSE_IN_FP8
        )


def test_random_numbers_are_tracked_by_the_same_rules() -> None:
    from megatron.core.extensions.transformer_engine import TECudaRNGStatesTracker

    torch.cuda.init()
    found = rules.facts_of_tracker(TECudaRNGStatesTracker(), 'cuda')
    assert found == rules.facts_of_tracker(GeneratorsTracker(), 'cpu')


@pytest.fixture
def alone() -> Iterator[None]:
    torch.distributed.init_process_group('nccl', store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures('alone')
def test_recorded_norm_is_returned_unchanged() -> None:
    from megatron.core.optimizer import clip_grads

    from megatron.moevement.state import global_scalars

    gradient = torch.arange(64.0, device='cuda') / 7
    norm = clip_grads.get_grad_norm_fp32([gradient])
    replayed = global_scalars._as_computed(float(norm))
    assert type(replayed) is type(norm)
    torch.testing.assert_close(replayed, norm, rtol=0.0, atol=0.0)
