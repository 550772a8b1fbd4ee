# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine itself has those rules of its stand-ins that need none of its kernels.

On a GPU these tests run its kernels all the same; what nothing but a kernel shows is in
`tests/gpu/test_stand_ins.py`.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

te = pytest.importorskip(
    'transformer_engine.pytorch',
    reason='needs Transformer Engine, in a run of this folder alone',
    exc_type=ImportError,
)

from megatron.moevement.seams import cpu_device, patches  # noqa: E402
from megatron.moevement.seams.adam import keeping  # noqa: E402
from megatron.moevement.state import low_precision  # noqa: E402
from tests.stand_ins import rules  # noqa: E402
from tests.stand_ins.fused_adam import FusedAdam, OlderFusedAdam  # noqa: E402
from tests.stand_ins.grouped_linear import GroupedLinear  # noqa: E402
from tests.stand_ins.one_rank import OneRank, assert_same  # noqa: E402
from tests.transformer_engine import kernels  # noqa: E402

pytestmark = pytest.mark.transformer_engine

CLOSE_IN_BF16 = {'rtol': 2e-2, 'atol': 2e-2}
WITHOUT_FP8 = [name for name, formats in rules.FORMATS.items() if rules.FP8 not in formats]
"""What of fp8 is stored is made by a kernel."""
IN_BF16: dict[str, Any] = {'params_dtype': torch.bfloat16}
IN_GROUPS = {'init_method': torch.nn.init.zeros_, **IN_BF16}


@pytest.fixture(autouse=True)
def _on_any_machine() -> Iterator[None]:
    product = kernels.grouped_product() if cpu_device.needed() else nullcontext()
    with kernels.claimed_gpu(), product:
        yield


@pytest.fixture
def real_adam() -> Any:
    return te.optimizers.FusedAdam


# ---- the optimizer


def test_adam_takes_the_same_arguments(real_adam: Any) -> None:
    """The real one takes all that the stand-in takes, with the same defaults."""
    for name in ('__init__', 'initialize_state'):
        taken = rules.arguments(getattr(real_adam, name))
        expected = rules.arguments(getattr(FusedAdam, name))
        assert {each: taken.get(each, 'not taken') for each in expected} == expected
    assert real_adam.__name__ == FusedAdam.__name__
    assert not issubclass(real_adam, torch.optim.Adam)


def test_adam_accepts_masters_in_fp8(real_adam: Any) -> None:
    """Upstream has it under the name that is wrapped for that."""
    from megatron.core.optimizer import Adam

    assert Adam is real_adam
    patches._find('megatron.core.optimizer:Adam')
    formats = rules.Formats(rules.BF16, rules.FP8, rules.BF16, rules.BF16)
    with pytest.raises(RuntimeError, match='only supports fp32/fp16 master weights'):
        rules.precise_adam(real_adam, formats, kernels.device())
    rules.precise_adam(keeping(real_adam), formats, kernels.device())


def test_adam_keeps_masters_in_the_same_form(real_adam: Any) -> None:
    found = rules.masters_of_adam(real_adam, kernels.device())
    assert found == rules.masters_of_adam(FusedAdam, 'cpu')


@pytest.mark.parametrize('kind', [FusedAdam, OlderFusedAdam, 'real'])
def test_steps_are_counted_by_group(real_adam: Any, kind: Any) -> None:
    """Also where nothing has a gradient; a group without parameters since version 2.20."""
    parameter = torch.nn.Parameter(torch.ones(4, device=kernels.device()))
    adam = (real_adam if kind == 'real' else kind)([{'params': [parameter]}, {'params': []}])
    assert not any('step' in group for group in adam.param_groups)
    for _ in range(2):
        adam.step()
    steps = [group.get('step') for group in adam.param_groups]
    expected = [[2, 2], [2, None]]
    assert steps in (expected if kind == 'real' else [expected[kind is OlderFusedAdam]])
    assert all(type(step) in (int, type(None)) for step in steps)
    assert parameter.tolist() == [1.0] * 4
    assert {name: held.tolist() for name, held in adam.state[parameter].items()} == {
        'exp_avg': [0.0] * 4,
        'exp_avg_sq': [0.0] * 4,
    }


def _forms(one: OneRank) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {part: (bits.dtype, bits.shape) for part, bits in one.captured().items()}


def _fill(one: OneRank) -> None:
    for number, (name, held) in enumerate(one.adam.state[one.main].items()):
        values = torch.arange(64.0, device=one.device) / 7 + number
        if held.dtype == torch.int16:
            values = values.to(torch.int16)
        one.adam.set_scaled_state(one.main, name, values)


@pytest.mark.parametrize('name', WITHOUT_FP8)
def test_state_of_16_and_32_bits_has_the_same_form_and_is_restored(
    real_adam: Any, name: str
) -> None:
    """Captured and restored by the product, bit for bit."""
    formats = rules.FORMATS[name]
    filled, fresh = (OneRank(real_adam, formats, kernels.device()) for _ in range(2))
    assert _forms(filled) == _forms(OneRank(FusedAdam, formats))
    _fill(filled)
    with pytest.raises(AssertionError):
        assert_same(fresh.captured(), filled.captured())
    fresh.restore(filled.captured())
    assert_same(fresh.captured(), filled.captured())
    for part in filled.adam.state[filled.main]:  # a scale that is not captured would show here
        found, expected = (one.adam.get_unscaled_state(one.main, part) for one in (fresh, filled))
        assert torch.equal(found, expected)


@pytest.mark.parametrize('name', WITHOUT_FP8)
def test_loaded_state_replaces_the_former_state(real_adam: Any, name: str) -> None:
    """A state dict holds fp32, or remainders."""
    ranks = (
        OneRank(real_adam, rules.FORMATS[name], kernels.device()),
        OneRank(FusedAdam, rules.FORMATS[name]),
    )
    dicts = []
    for one in ranks:
        _fill(one)
        before, bits = dict(one.adam.state[one.main]), one.captured()
        dicts.append(one.adam.state_dict())
        one.adam.load_state_dict(one.adam.state_dict())
        assert_same(one.captured(), bits)
        for part, held in before.items():
            assert one.adam.state[one.main][part].data_ptr() != held.data_ptr()
    real, stand_in = dicts
    assert real['param_groups'][0].keys() >= stand_in['param_groups'][0].keys()
    assert real['state'].keys() == stand_in['state'].keys()
    for part, value in stand_in['state'][0].items():
        assert real['state'][0][part].dtype == value.dtype
        torch.testing.assert_close(real['state'][0][part].cpu(), value)


# ---- layers


def test_layers_have_the_names_of_operators() -> None:
    where = {'device': kernels.device(), **IN_BF16}
    grouped = te.GroupedLinear(3, 16, 32, bias=False, init_method=None, **where)
    stand_in = GroupedLinear(3, 16, 32, **IN_GROUPS)
    shapes = [
        {name: (one.shape, one.dtype) for name, one in layer.named_parameters()}
        for layer in (grouped, stand_in)
    ]
    assert shapes[0] == shapes[1]
    with_bias = dict(te.GroupedLinear(2, 16, 32, bias=True, **where).named_parameters())
    assert with_bias.keys() == {'weight0', 'weight1', 'bias0', 'bias1'}
    normed = te.LayerNormLinear(16, 32, bias=False, normalization='RMSNorm', **where)
    assert dict(normed.named_parameters()).keys() == {'layer_norm_weight', 'weight'}
    for layer in (grouped, normed, te.Linear(16, 32, **where)):
        assert not dict(layer.named_buffers())
        assert layer.state_dict().keys() - dict(layer.named_parameters()) == {'_extra_state'}
        assert layer.get_extra_state().numel() == 0, 'without fp8 there is nothing in it'


@pytest.mark.parametrize(
    'wanted',
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_grouped_layer_reads_the_same_weight(wanted: tuple[bool, ...]) -> None:
    layer = te.GroupedLinear(3, 16, 32, bias=False, device=kernels.device(), **IN_GROUPS)
    found = rules.gradients_of_grouped(layer, wanted)
    expected = rules.gradients_of_grouped(GroupedLinear(3, 16, 32, **IN_GROUPS), wanted)
    assert [one is None for one in found] == [one is None for one in expected]
    for one, other in zip(found, expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, **CLOSE_IN_BF16)


@pytest.mark.parametrize('wants', [True, False])
def test_grouped_layer_delays_gradients_in_the_same_way(wants: bool) -> None:
    make = {'delay_wgrad_compute': True, **IN_GROUPS}
    layer = te.GroupedLinear(3, 16, 32, bias=False, device=kernels.device(), **make)
    found = rules.delayed_gradients_of_grouped(layer, [wants] * 3)
    expected = rules.delayed_gradients_of_grouped(GroupedLinear(3, 16, 32, **make), [wants] * 3)
    assert found['hooks'] == expected['hooks'] and found['marked'] == expected['marked']
    if wants:
        for one, other in zip(found['gradients'], expected['gradients'], strict=True):
            torch.testing.assert_close(one, other, **CLOSE_IN_BF16)
    else:  # newer versions of a grouped layer do not mind an empty queue
        assert found['gradients'] == [None] * 3


def test_linear_layer_handles_an_empty_queue() -> None:
    layer = te.Linear(16, 32, device=kernels.device(), delay_wgrad_compute=True, **IN_BF16)
    with pytest.raises(RuntimeError, match='empty'):
        layer.backward_dw()


# ---- fp8


@pytest.fixture
def delayed() -> Iterator[tuple[Any, Any]]:
    """A layer with the state of delayed scaling, and its recipe."""
    from transformer_engine.common.recipe import DelayedScaling, Format
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    recipe = DelayedScaling(fp8_format=Format.HYBRID, **rules.ASKED)
    layer = te.Linear(32, 32, bias=False, device=kernels.device(), **IN_BF16)
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
        layer.init_fp8_metadata(num_gemms=1)
    yield layer, recipe
    FP8GlobalStateManager.reset()


def _state(layer: Any) -> dict[str, torch.Tensor]:
    return dict(low_precision.scaling_of(torch.nn.ModuleList([layer])))


def test_delayed_scaling_is_found_and_updated_by_the_same_rules(
    delayed: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Largest values of 0 and of no finite value leave a scale, tiny ones make the largest."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from tests.stand_ins import fp8_compute

    layer, _ = delayed
    monkeypatch.setenv('NVTE_UNFUSED_FP8_UPDATE', '1')  # by torch, not by a kernel
    asked = fp8_compute.Recipe(True, fp8_compute.E5M2, **rules.ASKED)
    stand_in = {
        'scaling_fwd': fp8_compute.DelayedScaling(asked, 3),
        'scaling_bwd': fp8_compute.DelayedScaling(asked, 2),
    }
    found = _state(layer)
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        f'0.{direction}.{name}': (getattr(state, name).dtype, getattr(state, name).shape)
        for direction, state in stand_in.items()
        for name in ('scale', 'amax_history')
    }
    FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(layer.fp8_meta)
    seen = [0.0, 3.0, 1e-38], [0.5, 2.0, 0.0], [float('inf'), 1.0, 0.0], [0.0] * 3, [0.0] * 3
    for largest in seen:
        for direction, state in stand_in.items():
            now = torch.tensor(largest)[: len(state.scale)]
            for history in (layer.fp8_meta[direction].amax_history, state.amax_history):
                history[0].copy_(now)
            forward = direction == 'scaling_fwd'
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=forward)
            state.update(asked, (fp8_compute.E4M3 if forward else fp8_compute.E5M2).largest)
        for direction, state in stand_in.items():
            for name in ('scale', 'amax_history'):
                assert torch.equal(found[f'0.{direction}.{name}'].cpu(), getattr(state, name))
