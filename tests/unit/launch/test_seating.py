# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.launch.seating import Seating
from moevement_ext.replicate.placement import place_replicas


def seating(nodes: int, workers: int = 1, replicas: int = 1) -> Seating:
    """Each node has its own seat, and copies are where jobs place them."""
    made = Seating(nodes, workers)
    for seat in range(nodes):
        made.take(seat, f'n{seat}')
    domains = [f'n{rank // workers}' for rank in range(nodes * workers)]
    holders = place_replicas(domains, replicas)
    made.keepers = [{owner, *ranks} for owner, ranks in enumerate(holders)]
    return made


def lose(seats: Seating, host: str) -> list[str]:
    """Seat the ranks of a lost host elsewhere; returns their new hosts."""
    found = []
    for seat in seats.lose(host):
        best = seats.choices(seat, list(seats.seats))[0]
        seats.take(seat, best)
        found.append(best)
    return found


def exposed(seats: Seating) -> list[int]:
    """Ranks that have a copy, but none on another host."""
    workers = len(seats.keepers) // len(seats.hosts)
    return [
        owner
        for owner, ranks in enumerate(seats.keepers)
        if len(ranks) > 1 and len({seats.hosts[rank // workers] for rank in ranks}) == 1
    ]


def test_guests_go_where_no_copies_of_theirs_are() -> None:
    seats = seating(4)
    assert lose(seats, 'n3') == ['n1']  # n0 keeps its windows, and it keeps those of n2
    assert seats.guests == {3: 'n1'}
    assert seats.describe() == '3 of 4 nodes; node 3 is a guest of n1'


def test_guests_are_spread_over_hosts() -> None:
    seats = seating(8)
    assert [lose(seats, host) for host in ('n7', 'n3', 'n5')] == [['n1'], ['n0'], ['n2']]
    assert sorted(map(len, seats.seats.values())) == [1, 1, 2, 2, 2]


def test_host_of_guests_is_lost_too() -> None:
    seats = seating(5)
    assert lose(seats, 'n3') == ['n0']
    assert sorted(seats.seats['n0']) == [0, 3]
    assert lose(seats, 'n0') == ['n2', 'n1']
    assert seats.guests == {0: 'n2', 3: 'n1'}


def test_free_host_comes_first() -> None:
    seats = seating(4)
    seats.lose('n3')
    assert seats.choices(3, ['n0', 'n1', 'n2', 'n9'])[:2] == ['n9', 'n1']


def test_two_nodes_are_left_and_copies_share_a_node() -> None:
    seats = seating(2)
    seats.lose('n1')
    assert seats.exposed(1, 'n0') == 2
    seats.take(1, 'n0')
    assert seats.guests == {1: 'n0'}


@pytest.mark.parametrize('replicas', [0, 1])
def test_without_copies_no_rank_is_exposed(replicas: int) -> None:
    seats = seating(2, replicas=replicas)
    seats.lose('n1')
    assert seats.exposed(1, 'n0') == 2 * replicas


def test_returning_host_takes_its_former_seat() -> None:
    seats = seating(6)
    lose(seats, 'n5')
    lose(seats, 'n2')
    assert seats.guests.keys() == {5, 2}
    for host, seat in (('n2', 2), ('n5', 5)):
        assert seats.homecoming(host) == seat
        seats.take(seat, host)
    assert seats.guests == {}
    assert seats.describe() == ''
    assert seats.homecoming('n9') is None
    assert seats.seats == {f'n{seat}': [seat] for seat in range(6)}


def test_new_host_relieves_the_fullest() -> None:
    seats = seating(3)
    seats.lose('n2')
    seats.take(2, 'n0')
    seats.lose('n1')
    seats.take(1, 'n0')
    assert seats.homecoming('n9') in (1, 2)
    assert seats.homecoming('n1') == 1


def test_seat_moves_only_if_a_window_is_whole_without_it() -> None:
    seats = seating(3)
    held = [(rank, rank, '3') for rank in range(3)]
    assert not seats.windows_without(2, held)
    assert not seats.windows_without(2, [*held, (0, 2, '6')])
    whole = [*held, (0, 2, '3')]
    assert seats.windows_without(2, whole)
    assert not seats.windows_without(0, whole)


@given(nodes=st.integers(4, 9), workers=st.integers(1, 3), data=st.data())
def test_no_rank_shares_a_host_with_its_only_copy(
    nodes: int, workers: int, data: st.DataObject
) -> None:
    """With one copy, while three hosts are left."""
    seats = seating(nodes, workers)
    while len(seats.seats) > 3:
        host = data.draw(st.sampled_from(sorted(seats.seats)))
        lose(seats, host)
        assert seats.empty == []
        assert exposed(seats) == []
