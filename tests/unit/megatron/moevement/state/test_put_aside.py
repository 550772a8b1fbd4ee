# SPDX-License-Identifier: Apache-2.0
"""What an interrupted iteration has put aside is gone before the next one."""

import sys
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.moevement.seams import cpu_device

cpu_device.install()

from megatron.moevement.state.put_aside import drop_put_aside  # noqa: E402
from tests.stand_ins.grouped_linear import GroupedLinear  # noqa: E402


def layer() -> GroupedLinear:
    return GroupedLinear(
        2, 4, 3, init_method=torch.nn.init.ones_, params_dtype=torch.float32,
        delay_wgrad_compute=True,
    )  # fmt: skip


class FusedExperts(torch.nn.Module):
    """As upstream's experts, whose fused layers are not in the tree of modules."""

    def __init__(self, fused: GroupedLinear) -> None:
        super().__init__()
        self._fused_ops = (torch.nn.Sequential(fused),)


def gradient(one: GroupedLinear, value: float) -> torch.Tensor:
    """The gradient of the first weight after a backward pass with such tokens."""
    one(torch.full((5, 4), value), [2, 3]).sum().backward()
    one.backward_dw()
    (first, _) = one.parameters()
    assert first.grad is not None
    return first.grad.clone()


@pytest.mark.parametrize('module', [lambda one: one, FusedExperts])
def test_later_weight_gradients_are_of_their_own_pass(module: Any) -> None:
    one = layer()
    one(torch.full((5, 4), 7.0), [2, 3]).sum().backward()  # interrupted before `backward_dw`
    drop_put_aside([module(one)])
    assert torch.equal(gradient(one, 2.0), gradient(layer(), 2.0))


def test_deferred_gradients_of_the_output_layer_are_dropped() -> None:
    output = torch.nn.Linear(2, 2)
    output.embedding_activation_buffer, output.grad_output_buffer = [1, 2], [3]
    drop_put_aside([output])
    assert output.embedding_activation_buffer == output.grad_output_buffer == []


def test_scales_for_recomputations_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    stashes, firsts = [deque(['old']), deque()], [True]
    manager = SimpleNamespace(
        quantization_state=SimpleNamespace(fp8_tensors_recompute_buffer=stashes)
    )
    context = SimpleNamespace(_is_first_fp8_module=firsts)
    for name, part in (
        ('quantization', SimpleNamespace(FP8GlobalStateManager=manager)),
        ('distributed', SimpleNamespace(activation_recompute_forward=context)),
    ):
        monkeypatch.setitem(sys.modules, f'transformer_engine.pytorch.{name}', part)
    drop_put_aside([])
    assert stashes == [deque(), deque()] and firsts == []
