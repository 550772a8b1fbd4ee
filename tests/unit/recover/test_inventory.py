# SPDX-License-Identifier: Apache-2.0
import msgspec
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.memory.window.name import HeldWindow, Window, WindowName
from moevement_ext.recover.inventory import candidates, holders

NAMES = st.builds(WindowName, st.integers(0, 6), st.sampled_from(['plan-a', 'plan-b']))
CANDIDATES = st.builds(Window, NAMES, st.integers(1, 4))
PARTS = st.builds(HeldWindow, CANDIDATES, st.integers(0, 2))
INVENTORIES = st.lists(st.sets(PARTS, max_size=20), min_size=3, max_size=3)


def everything(inventories: list[set[HeldWindow]]) -> set[HeldWindow]:
    return set().union(*inventories)


def complete(world_size: int, *found: Window) -> list[HeldWindow]:
    return [HeldWindow(window, owner) for window in found for owner in range(world_size)]


@given(inventories=INVENTORIES)
def test_candidates_are_exactly_the_windows_of_all_owners(
    inventories: list[set[HeldWindow]],
) -> None:
    held = everything(inventories)
    expected = {
        part.window
        for part in held
        if all(HeldWindow(part.window, owner) in held for owner in range(3))
    }
    found = candidates(held, 3)
    assert len(found) == len(set(found))
    assert set(found) == expected


@given(inventories=INVENTORIES)
def test_newest_dense_state_is_listed_first(inventories: list[set[HeldWindow]]) -> None:
    dense = [found.dense_at for found in candidates(everything(inventories), 3)]
    assert dense == sorted(dense, reverse=True)


@given(parts=st.lists(PARTS, max_size=30), order=st.randoms())
def test_all_ranks_agree_regardless_of_the_order_of_reports(parts: list, order: object) -> None:
    shuffled = [*parts]
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert candidates(shuffled, 2) == candidates(parts, 2)


def test_a_window_that_ends_later_is_newer_than_one_that_begins_later() -> None:
    long, short = Window(WindowName(4, 'a'), 4), Window(WindowName(5, 'a'), 1)
    assert (long.dense_at, short.dense_at) == (7, 5)
    assert candidates(complete(2, short, long), 2) == [long, short]


def test_parts_of_different_plans_or_lengths_never_count_as_one_window() -> None:
    windows = [
        Window(WindowName(4, 'a'), 2),
        Window(WindowName(4, 'b'), 2),
        Window(WindowName(4, 'a'), 3),
    ]
    held = [HeldWindow(window, owner) for owner, window in enumerate(windows)]
    assert candidates(held, 3) == []


def test_a_window_of_a_larger_job_is_not_a_candidate() -> None:
    assert candidates(complete(3, Window(WindowName(0, 'a'), 2)), 2) == []


@given(inventories=INVENTORIES, wanted=PARTS)
def test_holders_are_all_ranks_with_the_window_owner_first(
    inventories: list[set[HeldWindow]], wanted: HeldWindow
) -> None:
    found = holders(wanted.window, wanted.owner, inventories)
    assert set(found) == {rank for rank in range(3) if wanted in inventories[rank]}
    others = [rank for rank in found if rank != wanted.owner]
    assert others == sorted(others)
    assert wanted.owner not in found or found[0] == wanted.owner


def test_inventories_travel_as_they_are() -> None:
    held = complete(2, Window(WindowName(3, 'a'), 2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(held), type=list[HeldWindow]) == held
