# SPDX-License-Identifier: Apache-2.0
"""Laws of twins and holders together, for any domains, levels and ranks of equal state."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.replicate import placement as module
from moevement_ext.replicate.placement import Copies, place_copies, place_replicas

names = st.sampled_from('abcde')
levelled = st.tuples(st.sampled_from('pq'), st.sampled_from('abc')).map('/'.join)
any_domains = st.one_of(
    st.lists(names, min_size=1, max_size=14), st.lists(levelled, min_size=1, max_size=14)
)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[str], list[int]]:
    """Domains and families of the ranks."""
    domains = draw(any_domains)
    ranks = range(len(domains))
    apart = draw(st.integers(1, len(domains)))
    return domains, draw(st.sampled_from([list(ranks), [rank % apart for rank in ranks]]))


def apart(one: str, other: str) -> int:
    """Levels on which two domains differ."""
    pairs = list(zip(one.split('/'), other.split('/'), strict=True))
    alike = next((level for level, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return len(pairs) - alike


def loads(placed: Copies) -> list[int]:
    counted = Counter(rank for held_by in placed.holders for rank in held_by)
    return [counted[rank] for rank in range(len(placed.holders))]


@given(jobs(), st.integers(0, 4), st.booleans())
def test_each_rank_has_its_copies_in_distinct_domains(
    job: tuple[list[str], list[int]], replicas: int, large: bool
) -> None:
    """As many as asked for, or as there are other domains; so no lost domain takes all of them."""
    domains, families = job
    with pytest.MonkeyPatch.context() as patched:
        if large:
            patched.setattr(module, 'MOST_EXCHANGED', 0)
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


@given(any_domains, st.integers(0, 4))
def test_placement_without_levels_and_equal_state_is_unchanged(
    domains: list[str], replicas: int
) -> None:
    domains = [name.replace('/', '') for name in domains]
    placed = place_copies(domains, replicas, range(len(domains)))
    assert placed == Copies([()] * len(domains), place_replicas(domains, replicas))


def test_copies_on_one_node_do_not_count() -> None:
    """Data-parallel peers beside each other are lost together."""
    nodes, families = ['a', 'a', 'b', 'b'], [0, 0, 2, 2]
    placed = place_copies(nodes, 1, families)
    assert placed.twins == [()] * 4
    assert [nodes[held_by] for (held_by,) in placed.holders] == ['b', 'b', 'a', 'a']


def test_peers_save_replicas() -> None:
    """Two stages with two data-parallel ranks each; the ranks of a stage are on two nodes."""
    nodes, families = ['a', 'b', 'c', 'd'], [0, 0, 2, 2]
    one = place_copies(nodes, 1, families)
    assert one.twins == [(1,), (0,), (3,), (2,)] and one.holders == [()] * 4
    two = place_copies(nodes, 2, families)
    assert two.twins == one.twins
    assert [len(held_by) for held_by in two.holders] == [1] * 4
    assert all({*held_by} & {2, 3} for held_by in two.holders[:2])
    assert sorted(loads(two)) == [1] * 4


def test_a_holder_beside_a_twin_is_no_copy_more() -> None:
    """Rank 2 needs two holders; the others have a twin, and one holder where it is not."""
    placed = place_copies(['a', 'b', 'c'], 2, [0, 0, 2])
    assert placed.twins == [(1,), (0,), ()]
    assert placed.holders[:2] == [(2,), (2,)] and {*placed.holders[2]} == {0, 1}


@pytest.mark.parametrize('replicas', [1, 2, 3])
def test_all_ranks_are_twins_equally_often(replicas: int) -> None:
    nodes = [f'node{rank // 2}' for rank in range(16)]
    placed = place_copies(nodes, replicas, [rank % 2 for rank in range(16)])
    assert Counter(rank for twins in placed.twins for rank in twins) == dict.fromkeys(
        range(16), replicas
    )


@pytest.mark.parametrize('large', [False, True])
def test_near_holders_are_preferred_and_equally_loaded(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three pods of two racks of two ranks: the first copy stays in the pod, the next cannot."""
    if large:
        monkeypatch.setattr(module, 'MOST_EXCHANGED', 0)
    domains = [f'pod{rank // 4}/rack{rank // 2}' for rank in range(12)]
    one, two = (place_copies(domains, count, range(12)) for count in (1, 2))
    assert loads(one) == [1] * 12
    for owner, held_by in enumerate(one.holders):
        assert [apart(domains[owner], domains[rank]) for rank in held_by] == [1]
    for owner, held_by in enumerate(two.holders):
        assert sorted(apart(domains[owner], domains[rank]) for rank in held_by) == [1, 2]
    assert max(loads(two)) <= (2 if not large else 3)


def test_a_choice_of_a_holder_compares_domains_instead_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 16,384 ranks it would take seconds, at a start as in every replacement."""
    compared: list[int] = []

    def counted(full: np.ndarray, *values: object) -> np.ndarray:
        compared.append(full.size)
        return where(full, *values)

    where = np.where
    monkeypatch.setattr(module, 'MOST_EXCHANGED', 0)
    monkeypatch.setattr(np, 'where', counted)
    place_copies([f'pod{rank // 64}/rack{rank // 16}' for rank in range(256)], 2, range(256))
    assert compared == [256 // 16] * 2 * 256


def test_racks_of_one_name_in_two_pods_are_two_domains() -> None:
    placed = place_copies(['p/a', 'q/a'], 1, [0, 1])
    assert placed.holders == [(1,), (0,)]


def lost_with(domain: str, domains: Sequence[str], placed: Copies) -> list[int]:
    """Owners of which nothing is left."""
    return [
        owner
        for owner in range(len(domains))
        if all(domains[rank] == domain for rank in (owner, *placed.reached(owner)))
    ]


@given(jobs(), st.integers(1, 3))
def test_no_domain_takes_all_copies_of_a_rank(
    job: tuple[list[str], list[int]], replicas: int
) -> None:
    """Nor of a whole stage group, whose ranks may well be the only copies of each other."""
    domains, families = job
    placed = place_copies(domains, replicas, families)
    if len(set(domains)) > 1:
        assert [lost_with(domain, domains, placed) for domain in set(domains)] == [
            [] for _ in set(domains)
        ]
