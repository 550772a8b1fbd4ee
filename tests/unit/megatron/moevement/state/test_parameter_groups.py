# SPDX-License-Identifier: Apache-2.0
"""A joining process builds optimizers for all kinds of parameters in the job."""

from collections.abc import Iterator

import megatron.core.optimizer as upstream
import pytest
import torch
from torch.distributed import HashStore

from megatron.moevement.seams.upstream import groups_of_all_ranks
from moevement_ext.membership.exchange import Exchange


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A world of one rank."""
    torch.distributed.init_process_group('gloo', store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _kinds(exchange: Exchange, experts: bool) -> list[tuple[bool, float, int]]:
    """For each group: expert flag, weight decay factor and number of parameters."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    if experts:
        model[1].weight.allreduce = False
    config = upstream.OptimizerConfig(lr=0.1)
    overrides = upstream.get_standard_config_overrides(config)
    with groups_of_all_ranks(exchange):
        groups = upstream._get_param_groups([model], config, overrides)
    return sorted(
        (group['is_expert_parallel'], group['wd_mult'], len(group['params'])) for group in groups
    )


def test_groups_of_other_ranks_exist_and_are_empty() -> None:
    archive = HashStore()
    assert _kinds(Exchange(archive), experts=True) == [
        (False, 0.0, 1),
        (False, 1.0, 1),
        (True, 1.0, 1),
    ]
    assert _kinds(Exchange(archive, joining=True), experts=False) == [
        (False, 0.0, 1),
        (False, 1.0, 2),
        (True, 1.0, 0),
    ]
    assert _kinds(Exchange(), experts=False) == [(False, 0.0, 1), (False, 1.0, 2)]
