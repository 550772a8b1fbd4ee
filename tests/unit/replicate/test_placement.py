# SPDX-License-Identifier: Apache-2.0
"""Laws of replica placement, of twins and holders together."""

import json
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.config import ConfigurationError
from moevement_ext.replicate.placement import (
    Copies,
    failure_domains,
    own_domain,
    place_copies,
    place_replicas,
)
from tests.support.messages import messages

any_domains = st.lists(st.sampled_from('abcde'), min_size=1, max_size=14)
equal_domains = st.integers(1, 6).flatmap(
    lambda count: st.integers(1, 4).flatmap(
        lambda size: st.permutations([f'node{index}' for index in range(count)] * size)
    )
)


def loads(holders):
    counted = Counter(rank for held_by in holders for rank in held_by)
    return [counted[rank] for rank in range(len(holders))]


def smallest_largest_load(domains, replicas):
    """Smallest possible load of the most loaded rank, by trying every placement."""
    copies = min(replicas, len(set(domains)) - 1)
    best = len(domains)

    def extend(owner, load):
        nonlocal best
        if owner == len(domains):
            best = max(load)
            return
        for chosen in combinations(range(len(domains)), copies):
            grown = [count + (rank in chosen) for rank, count in enumerate(load)]
            apart = len({domains[rank] for rank in (owner, *chosen)}) == copies + 1
            if apart and max(grown) < best:
                extend(owner + 1, grown)

    extend(0, [0] * len(domains))
    return best


@given(equal_domains, st.integers(0, 4))
def test_equal_domains_load_every_rank_alike(domains, replicas):
    holders = place_replicas(domains, replicas)
    assert len(set(loads(holders))) == 1
    assert holders == place_replicas(domains, replicas)


@given(st.lists(st.sampled_from('abcd'), min_size=2, max_size=6), st.integers(1, 2))
def test_unequal_domains_are_loaded_as_equally_as_possible(domains, replicas):
    if len(set(domains)) > 1:
        holders = place_replicas(domains, replicas)
        assert max(loads(holders)) == smallest_largest_load(domains, replicas)


def test_a_single_domain_has_no_holders():
    assert place_replicas(['node0'] * 3, 2) == [(), (), ()]
    assert place_replicas([], 2) == []


names = st.sampled_from('abcde')
levelled = st.tuples(st.sampled_from('pq'), st.sampled_from('abc')).map('/'.join)
named_domains = st.one_of(
    st.lists(names, min_size=1, max_size=14), st.lists(levelled, min_size=1, max_size=14)
)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[str], list[int]]:
    domains = draw(named_domains)
    ranks = range(len(domains))
    apart = draw(st.integers(1, len(domains)))
    return domains, draw(st.sampled_from([list(ranks), [rank % apart for rank in ranks]]))


def apart(one: str, other: str) -> int:
    """Levels on which two domains differ."""
    pairs = list(zip(one.split('/'), other.split('/'), strict=True))
    alike = next((level for level, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return len(pairs) - alike


@given(jobs(), st.integers(0, 4))
def test_each_rank_has_its_copies_in_distinct_domains(
    job: tuple[list[str], list[int]], replicas: int
) -> None:
    """As many as asked for, or as there are other domains; so no lost domain takes all of them."""
    domains, families = job
    placed = place_copies(domains, replicas, families)
    assert placed == place_copies(domains, replicas, families)
    wanted = min(replicas, len(set(domains)) - 1)
    for owner in range(len(domains)):
        reached = placed.reached(owner)
        assert len(reached) == wanted
        assert len({domains[rank] for rank in (owner, *reached)}) == wanted + 1
        assert all(families[rank] == families[owner] for rank in placed.twins[owner])
        assert all(families[rank] != families[owner] for rank in placed.holders[owner])
    assert placed.least() == wanted


@given(jobs(), st.integers(1, 4))
def test_nothing_is_sent_that_a_peer_holds_anyway(
    job: tuple[list[str], list[int]], replicas: int
) -> None:
    domains, families = job
    placed = place_copies(domains, replicas, families)
    for owner, family in enumerate(families):
        same = [rank for rank in range(len(domains)) if families[rank] == family]
        elsewhere = {domains[rank] for rank in same} - {domains[owner]}
        assert len(placed.twins[owner]) == min(replicas, len(elsewhere))


@given(jobs(), st.integers(1, 3))
def test_the_nearest_twins_count(job: tuple[list[str], list[int]], replicas: int) -> None:
    domains, families = job
    placed = place_copies(domains, replicas, families)
    for owner, twins in enumerate(placed.twins):
        chosen = [domains[rank] for rank in twins]
        others = {
            domains[rank]
            for rank, family in enumerate(families)
            if family == families[owner] and domains[rank] not in (*chosen, domains[owner])
        }
        farthest = max((apart(domains[owner], name) for name in chosen), default=0)
        assert all(apart(domains[owner], name) >= farthest for name in others)


@given(named_domains, st.integers(0, 4))
def test_placement_without_levels_and_equal_state_is_unchanged(
    domains: list[str], replicas: int
) -> None:
    domains = [name.replace('/', '') for name in domains]
    placed = place_copies(domains, replicas, range(len(domains)))
    assert placed == Copies([()] * len(domains), place_replicas(domains, replicas))


def test_near_holders_are_preferred_and_equally_loaded() -> None:
    """Pods of racks of two ranks: the first copies stay in the pod while it has other racks."""
    for pods, racks in ((3, 2), (4, 3), (2, 4)):
        ranks = 2 * racks * pods
        domains = [f'pod{rank // (2 * racks)}/rack{rank // 2}' for rank in range(ranks)]
        for count in (1, 2, 3):
            holders = place_copies(domains, count, range(ranks)).holders
            assert loads(holders) == [count] * ranks
            inside = min(count, racks - 1)
            for owner, held_by in enumerate(holders):
                away = sorted(apart(domains[owner], domains[rank]) for rank in held_by)
                assert away == [1] * inside + [2] * (count - inside)


# Failure domains by a topology file


@pytest.mark.parametrize('levels', [['rack1', 'pod2'], 'pod2/rack1'])
def test_topology_file_gives_the_levels(tmp_path: Path, levels: object) -> None:
    path = tmp_path / 'topology.json'
    path.write_text(json.dumps({'a': levels, 'b': ['rack1', 'pod3'], 'spare': 'pod4/rack1'}))
    assert failure_domains(['a', 'b', 'a'], str(path)) == ['pod2/rack1', 'pod3/rack1', 'pod2/rack1']


@pytest.mark.parametrize(('content', 'rule'), messages('topology'))
def test_a_file_with_other_levels_is_refused_in_a_line(
    tmp_path: Path, content: str, rule: str
) -> None:
    path = tmp_path / 'topology.json'
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=rule) as refused:
        failure_domains(['a'], str(path))
    assert str(refused.value).startswith(f'--sparse-ckpt-topology {path}: ')
    assert '\n' not in str(refused.value)


@pytest.mark.parametrize('content', [None, '', '{', '[]', '7', '"a"'])
def test_unreadable_topology_file_is_named_with_its_format(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / 'topology.json'
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=f'--sparse-ckpt-topology {path}: expected a JSON'):
        failure_domains(['a'], str(path))


def test_nodes_the_file_leaves_out_are_named(tmp_path: Path) -> None:
    path = tmp_path / 'topology.json'
    path.write_text('{"a": "rack1"}')
    with pytest.raises(ConfigurationError, match=r"does not name the nodes \['b', 'c'\]"):
        failure_domains(['a', 'c', 'b'], str(path))


def test_own_domain_of_an_unnamed_node_is_empty(tmp_path: Path) -> None:
    path = tmp_path / 'topology.json'
    assert own_domain('a', str(path)) == ''
    path.write_text('{"a": "rack1"}')
    assert (own_domain('a', str(path)), own_domain('b', str(path))) == ('rack1', '')
    assert own_domain('b', None) == 'b'
