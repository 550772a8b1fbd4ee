# SPDX-License-Identifier: Apache-2.0
"""Ranks that capture the same state, by upstream's groups."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.moevement.state import dp_copy


class Groups:
    """Upstream's groups of rank 2 of 8, as lists of ranks."""

    def __init__(self) -> None:
        self.dense = [0, 2, 4, 6]
        self.expert = [0, 2, 4, 6]
        self.instances: list[int] | None = None

    def get_data_parallel_group(self, with_context_parallel: bool) -> list[int]:
        assert with_context_parallel
        return self.dense

    def get_expert_data_parallel_group(self) -> list[int]:
        return self.expert

    def get_inter_distributed_optimizer_instance_group(
        self, check_initialized: bool
    ) -> list[int] | None:
        assert not check_initialized
        return self.instances


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    groups = Groups()
    monkeypatch.setattr(dp_copy, 'parallel_state', groups)
    monkeypatch.setattr(dp_copy, '_ranks', lambda group: group)
    return groups


def facts(distributed: bool, random_init: bool = False, copies: bool = True) -> Any:
    return SimpleNamespace(
        rank=2,
        use_distributed_optimizer=distributed,
        data_parallel_random_init=random_init,
        copies_from_peers=copies,
    )


@pytest.mark.parametrize(
    ('distributed', 'expert', 'instances', 'replicas', 'twins'),
    [
        # Without the distributed optimizer ranks hold the same state, but capture other shares.
        (False, [0, 2, 4, 6], None, [0, 4, 6], []),
        (False, [0, 2, 4, 6], [2, 6], [0, 4, 6], []),
        (False, [2, 6], None, [6], []),
        (False, [1, 2, 3], None, [], []),  # experts are replicated where the rest is not
        (True, [0, 2, 4, 6], None, [], []),
        (True, [0, 2, 4, 6], [2, 6], [], [6]),
        (True, [0, 2, 4, 6], [2, 4], [], []),  # these have other shards of what is no expert
    ],
)
def test_ranks_with_the_same_state_or_the_same_shard(
    groups: Groups,
    distributed: bool,
    expert: list[int],
    instances: list[int] | None,
    replicas: list[int],
    twins: list[int],
) -> None:
    """No rank has both: a twin always has the windows that its replay began from."""
    groups.expert, groups.instances = expert, instances
    assert dp_copy.replicas(facts(distributed)) == replicas
    assert dp_copy.twins(facts(distributed)) == twins
    assert dp_copy.replicas(facts(distributed, random_init=True)) == []
    assert dp_copy.twins(facts(distributed, random_init=True)) == []


def test_no_rank_where_each_draws_as_many_numbers_as_its_sequences_need(groups: Groups) -> None:
    """A copy would give a lost rank the generators of another one."""
    assert dp_copy.replicas(facts(False), lengths_differ=True) == []
    assert dp_copy.replicas(facts(False, copies=False)) == [], 'a loop of its own may draw anything'
