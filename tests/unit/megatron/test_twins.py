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


def test_replicas_without_the_distributed_optimizer_are_no_twins(groups: Groups) -> None:
    """They hold the same state, but each captures another share."""
    assert dp_copy.replicas(facts(False)) == [0, 4, 6]
    assert dp_copy.twins(facts(False)) == []
    groups.expert = [2, 6]
    assert dp_copy.replicas(facts(False)) == [6]
    groups.expert = [1, 2, 3]
    assert dp_copy.replicas(facts(False)) == [], 'experts are replicated where the rest is not'


@pytest.mark.parametrize('distributed', [False, True])
def test_random_init_per_rank_leaves_no_replicas_or_twins(
    groups: Groups, distributed: bool
) -> None:
    groups.instances = [2, 6]
    assert dp_copy.replicas(facts(distributed, random_init=True)) == []
    assert dp_copy.twins(facts(distributed, random_init=True)) == []


def test_no_rank_where_each_draws_as_many_numbers_as_its_sequences_need(groups: Groups) -> None:
    """A copy would give a lost rank the generators of another one."""
    assert dp_copy.replicas(facts(False), lengths_differ=True) == []
    assert dp_copy.replicas(facts(False, copies=False)) == [], 'a loop of its own may draw anything'


def test_twins_have_the_same_shard_in_another_optimizer_instance(groups: Groups) -> None:
    assert dp_copy.twins(facts(True)) == []
    groups.instances = [2, 6]
    assert dp_copy.twins(facts(True)) == [6]
    assert dp_copy.replicas(facts(True)) == []
    groups.instances = [2, 4]
    assert dp_copy.twins(facts(True)) == [], 'these have other shards of what is no expert'


@pytest.mark.parametrize('distributed', [False, True])
@pytest.mark.parametrize('instances', [None, [2, 6]])
def test_rank_with_replicas_has_no_twins(
    groups: Groups, distributed: bool, instances: list[int] | None
) -> None:
    """Hence a twin always has the windows that it captured, or that its replay began from."""
    groups.instances = instances
    same = facts(distributed)
    assert not (dp_copy.replicas(same) and dp_copy.twins(same))
    assert dp_copy.replicas(same) or dp_copy.twins(same) or distributed
