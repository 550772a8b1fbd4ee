# SPDX-License-Identifier: Apache-2.0
"""A difference between ranks, or to the launch that captured windows, is told by name."""

import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.errors import UserError
from moevement_ext.memory.window import settings
from moevement_ext.memory.window.settings import RunSettings
from moevement_ext.recover import launched_alike
from moevement_ext.recover.inventory import Inventory

OWN = RunSettings({'--seed': '1'}, environment={'NCCL_ALGO': 'Ring'})
OTHER_SEED = msgspec.structs.replace(OWN, flags={'--seed': '2'})
OTHER_RINGS = msgspec.structs.replace(OWN, environment={})


def check(*launched: RunSettings, strict: bool = False, **found: Any) -> list[str]:
    rank = SimpleNamespace(
        number=0,
        run_id='run',
        identity=SimpleNamespace(settings=launched[0]),
        config=SparseCheckpointConfig(strict=strict),
        exchange=lambda name, own: [settings.encode(one) for one in launched],
    )
    inventories = [Inventory([], [], settings=settings.digest_of(one)) for one in launched]
    inventories[-1] = msgspec.structs.replace(inventories[-1], **found)
    return launched_alike.check(rank, inventories)  # type: ignore[arg-type]


def test_ranks_that_are_launched_alike_need_not_ask() -> None:
    assert check(OWN, OWN) == []


@pytest.mark.parametrize('strict', [False, True])
def test_another_seed_of_a_rank_is_refused(strict: bool) -> None:
    with pytest.raises(UserError, match='than rank 0: --seed: rank 0 1, rank 1 2. Launch'):
        check(OWN, OTHER_SEED, OTHER_SEED, strict=strict)


def test_another_environment_of_a_rank_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert check(OWN, OWN, OTHER_RINGS) == []
    assert 'NCCL_ALGO: rank 0 Ring, rank 2 absent' in caplog.text
    with pytest.raises(UserError, match='--sparse-ckpt-strict: .*NCCL_ALGO: rank 0 Ring, rank 2'):
        check(OWN, OWN, OTHER_RINGS, strict=True)


def test_windows_of_another_launch_are_said(caplog: pytest.LogCaptureFixture) -> None:
    found = {'refused': ['--lr: was 1, is 2'], 'doubtful': ['torch: was 2, is 3']}
    with caplog.at_level(logging.WARNING):
        assert check(OWN, OWN, **found) == ['--lr: was 1, is 2']
    assert 'another launch: torch: was 2, is 3' in caplog.text
    with pytest.raises(UserError, match='--lr: was 1, is 2; torch: was 2, is 3. Launch it as'):
        check(OWN, OWN, strict=True, **found)
