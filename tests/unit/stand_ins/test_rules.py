# SPDX-License-Identifier: Apache-2.0
"""The stand-ins have the rules of Transformer Engine that the adapter relies on."""

import pytest
import torch

from tests.stand_ins import rules
from tests.stand_ins.fused_adam import FusedAdam, OlderFusedAdam, join, split
from tests.stand_ins.grouped_linear import GroupedLinear
from tests.stand_ins.rules import BF16, FP8, FP16, FP32


@pytest.mark.parametrize(
    ('kind', 'of_empty_group'), [(FusedAdam, 3), (OlderFusedAdam, None)], ids=['newer', 'older']
)
def test_adam_counts_steps_by_group_and_skips_parameters_without_gradient(
    kind: type[FusedAdam], of_empty_group: int | None
) -> None:
    facts = rules.facts_of_adam(kind, 'cpu')
    assert facts.state == dict.fromkeys(('exp_avg', 'exp_avg_sq'), (torch.float32, (4,)))
    assert facts.steps == [3, of_empty_group]
    assert facts.without_gradient == [1.0] * 4 + [0.0] * 8
    assert facts.in_place
    assert facts.replaced_by_load


@pytest.mark.parametrize('wants', [True, False])
def test_delayed_gradients_have_the_same_bits_and_frozen_weights_none(wants: bool) -> None:
    make = {'init_method': torch.nn.init.zeros_, 'params_dtype': torch.float32}
    at_once = rules.gradients_of_grouped(GroupedLinear(3, 16, 32, **make), [wants] * 3)
    later = GroupedLinear(3, 16, 32, delay_wgrad_compute=True, **make)
    found = rules.delayed_gradients_of_grouped(later, [wants] * 3)
    assert (found['computed'], found['hooks']) == (wants, ([], ['hook'] if wants else []))
    assert found['marked'] == [True] * 3
    for gradient, expected in zip(found['gradients'], at_once[1:], strict=True):
        assert gradient is expected is None or torch.equal(gradient, expected)


# ---- state of 16 and 8 bits


@pytest.mark.parametrize('name', rules.FORMATS)
def test_low_precision_state_keeps_its_form_and_its_storage(name: str) -> None:
    formats = rules.FORMATS[name]
    facts = rules.facts_of_precision(FusedAdam, formats, 'cpu')
    remainders = (formats.weight, formats.master) == (BF16, FP32)
    forms = {
        'exp_avg': formats.first,
        'exp_avg_sq': formats.second,
        'master_param': torch.int16 if remainders else formats.master,
    }
    assert facts.state == {name: (form, (64,)) for name, form in forms.items()}
    prefix = {FP16: 'scale', FP8: 'scale_inv'}
    scaled = {f'{prefix[form]}/{name}' for name, form in forms.items() if form in prefix}
    assert facts.scales == dict.fromkeys(scaled, (FP32, (1,)))
    assert facts.in_place
    assert facts.idle


def _bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """All fp32 values of these halves, given as int32 from 0 to 65535."""
    return ((high[:, None] << 16) | low[None, :]).flatten().to(torch.int32).view(FP32)


def test_remainders_hold_every_bit_of_a_master() -> None:
    every = torch.arange(1 << 16)
    some = torch.tensor([0, 1, 2, 0x7F7F, 0x7FFF, 0x8000, 0x8001, 0xFF80, 0xFFFF])
    for master in (_bits(every, some), _bits(some, every)):
        weight, remainder = split(master)
        assert torch.equal(join(weight, remainder).view(torch.int32), master.view(torch.int32))
        finite = master.isfinite() & weight.isfinite()
        away = (weight.float() - master).abs() <= (master.bfloat16().float() - master).abs()
        assert away[finite].all(), 'the weight is the master, rounded to the nearest'
