# SPDX-License-Identifier: Apache-2.0
"""Masters in fp8 can be asked for; a dense restart has a step counter for each parameter."""

from argparse import Namespace
from collections.abc import Iterator

import pytest
import torch
from megatron.core import optimizer as upstream

from megatron.moevement.seams import adam as seam
from moevement_ext.config import ConfigurationError
from moevement_ext.errors import UserError
from tests.stand_ins.fused_adam import FusedAdam
from tests.stand_ins.rules import FP8, FP16
from tests.unit.megatron.moevement.job.test_identity import parsed

ASKED = {'main_params_dtype': FP8}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make upstream find Transformer Engine; patches are undone afterwards."""
    monkeypatch.setattr(upstream, 'Adam', FusedAdam)
    seam._install.cache_clear()
    yield
    seam._install.cache_clear()


ADAM_SCALES = ('--use-precision-aware-optimizer', '--main-params-dtype', 'fp16')
FLAG = '--sparse-ckpt-fp8-masters'


def validated(*flags: str) -> Namespace:
    args = parsed(*flags)
    formats = {'fp32': torch.float32, 'fp16': FP16}
    args.main_params_dtype = formats[args.main_params_dtype]  # as upstream's validation converts it
    return args


def test_flag_replaces_16_bit_masters_by_fp8() -> None:
    for flags, expected in (((), torch.float32), (ADAM_SCALES, FP16), ((*ADAM_SCALES, FLAG), FP8)):
        args = validated(*flags)
        seam.choose_fp8_masters(args)
        assert args.main_params_dtype == expected


@pytest.mark.parametrize('flags', [(), ADAM_SCALES[:1], ADAM_SCALES[1:]])
def test_flag_needs_16_bit_masters(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match='add --use-precision-aware-optimizer --main-par'):
        seam.choose_fp8_masters(validated(*flags, FLAG))


@pytest.mark.usefixtures('engine')
@pytest.mark.parametrize('asked', ['fp32', 'fp16', torch.float32, FP16, None])
def test_other_masters_keep_upstreams_adam(asked: object) -> None:
    seam.install_fp8_masters({'main_params_dtype': asked})
    seam.install_fp8_masters({})
    assert upstream.Adam is FusedAdam


@pytest.mark.usefixtures('engine')
def test_upstream_builds_an_adam_with_fp8_masters() -> None:
    for _ in range(2):  # two jobs in one process
        seam.install_fp8_masters(ASKED)
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    settings = {'master_weights': True, 'use_decoupled_grad': True}
    adam = upstream.Adam([weight], master_weight_dtype=FP8, **settings)
    adam.initialize_state(weight, False)
    assert isinstance(adam, FusedAdam)
    assert adam.state[weight]['master_param']._data.dtype == FP8
    assert type(upstream.Adam([weight], master_weight_dtype=FP16, **settings)) is FusedAdam


def test_other_adam_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seam._install.cache_clear()
    monkeypatch.setattr(upstream, 'Adam', torch.optim.AdamW)
    with pytest.raises(UserError, match='megatron.core.optimizer:Adam has the parameters'):
        seam.install_fp8_masters(ASKED)


@pytest.mark.parametrize(('kind', 'lost'), [(FusedAdam, True), (seam.keeping(FusedAdam), False)])
def test_all_zero_state_stays_zero(kind: type, lost: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    adam = kind([weight], master_weights=True, master_weight_dtype=FP16, exp_avg_dtype=FP8)
    adam.name_to_dtype_map['master_param'] = FP8
    adam.initialize_state(weight, False)
    for name in ('exp_avg', 'master_param'):
        adam.set_scaled_state(weight, name, torch.zeros(8))
        found = adam.get_unscaled_state(weight, name)
        assert found.isnan().all() if lost else (found == 0).all()
