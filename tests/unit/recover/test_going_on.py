# SPDX-License-Identifier: Apache-2.0
"""Whose replay goes on after another failure, and which windows and histories it may take."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.membership.report import NOWHERE, Report, UnderWay
from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.name import HeldWindow, History, Window, WindowName, drawn_history
from moevement_ext.recover.inventory import candidates, take_stock
from moevement_ext.recover.verdict import Localized, WholeJob, decide_recovery
from tests.unit.memory.samples import PLAN, identity_of, make_file
from tests.unit.recover.test_verdict import (
    LAST,
    Job,
    everywhere,
    jobs,
    localized,
    replacement,
    survivor,
)

OLD, NEW, NEWER = (Window(WindowName(start, 'plan'), 3) for start in (2, 5, 6))
STAGES = 5
REPLAY = UnderWay(NEW, 9)


def replays_since(under_way: UnderWay, windows: Sequence[HeldWindow] = ()) -> Report:
    report = survivor(9, NOWHERE, NOWHERE, windows)
    return msgspec.structs.replace(report, under_way=under_way)


def job(
    under_way: Sequence[int],
    lost: Sequence[int] = (),
    windows: Sequence[Window] = (OLD, NEW),
    replay: UnderWay = REPLAY,
) -> Job:
    """Of some stages a replay is under way, others were lost beside it."""
    held = everywhere(STAGES, *windows)
    reports = [survivor(9, windows=held) for _ in range(STAGES)]
    for stage in under_way:
        reports[stage] = replays_since(replay, held)
    for stage in lost:
        reports[stage] = replacement()
    return Job(reports, [*range(STAGES)])


def going_on(found: Job) -> set[int]:
    verdict = localized(found.verdict())
    assert verdict.beginning == verdict.ranks - verdict.going_on
    return set(verdict.going_on)


@pytest.mark.parametrize(
    ('under_way', 'lost', 'stay'),
    [
        ([0], [2], [0]),
        ([0], [3, 4], [0]),
        ([2], [4], [2]),
        ([0], [1], []),
        ([2], [1], []),
        ([2], [3], []),
        ([0, 3], [2], [0]),
        ([0, 2], [4], [0, 2]),
        ([1, 2], [4], [1, 2]),
        ([1, 2], [3], []),  # nor does the one that reads what its neighbour sends anew
        ([0], [], [0]),
        ([0, 2], [], [0, 2]),
        ([0, 1, 3], [], [3]),  # each may wait for the other, which no log tells
    ],
)
def test_undisturbed_stage_continues(
    under_way: list[int], lost: list[int], stay: list[int]
) -> None:
    verdict = localized(job(under_way, lost).verdict())
    assert verdict.going_on == set(stay)
    assert (verdict.target, verdict.stages) == (9, {*under_way, *lost})
    assert verdict.window == NEW


def test_stages_that_share_weights_continue_together() -> None:
    assert going_on(job([0, 4], [2])._replace(tied=True)) == {0, 4}
    assert going_on(job([0, 4], [1])._replace(tied=True)) == set()
    assert going_on(job([0], [4])._replace(tied=True)) == set()


def test_the_ends_are_neighbours_where_stages_have_virtual_chunks() -> None:
    assert going_on(job([0], [4])._replace(interleaved=True)) == set()
    assert going_on(job([0], [3])._replace(interleaved=True)) == {0}


@pytest.mark.parametrize(
    ('windows', 'taken', 'stay'),
    [
        ((OLD,), OLD, set()),  # what it logs would not reach back as far as that
        ((OLD, NEW), NEW, {0}),
        ((OLD, NEW, NEWER), NEWER, {0}),  # it has captured that anew
        ((NEWER,), NEWER, {0}),  # and its own is outdated by now
    ],
)
def test_earlier_stage_continues(windows: Sequence[Window], taken: Window, stay: set[int]) -> None:
    verdict = localized(job([0], [3], windows).verdict())
    assert (verdict.window, verdict.going_on) == (taken, stay)


def test_continuing_replays_need_no_window() -> None:
    verdict = localized(job([0], windows=()).verdict())
    assert (verdict.window, verdict.going_on) == (NEW, {0})
    assert job([0], [3], windows=()).verdict() == WholeJob('no window is complete on all ranks')


def test_a_replay_to_another_end_begins_again() -> None:
    assert going_on(job([0], [3], replay=UnderWay(OLD, 8))) == set()


@pytest.mark.parametrize('other', [survivor(9), survivor(9, NOWHERE), replacement()])
def test_all_ranks_of_a_stage_continue_or_none(other: Report) -> None:
    held = everywhere(4, NEW)
    stage_of = [0, 0, 1, 1]
    both = [replays_since(REPLAY), replays_since(REPLAY), *2 * [survivor(9, windows=held)]]
    assert going_on(Job(both, stage_of)) == {0, 1}
    assert going_on(Job([both[0], other, *both[2:]], stage_of)) == set()
    later = replays_since(UnderWay(NEWER, 9))
    assert going_on(Job([both[0], later, *both[2:]], stage_of)) == set()


@pytest.mark.parametrize(('first_logged', 'stay'), [(NOWHERE, False), (7, True)])
def test_lost_log_of_a_neighbour_is_no_longer_read(first_logged: int, stay: bool) -> None:
    found = job([1], [4])
    found.reports[2] = survivor(9, first_logged=first_logged, windows=found.reports[2].windows)
    verdict = found.verdict()
    assert isinstance(verdict, Localized) == stay
    assert not stay or going_on(found) == {1}


@given(found=jobs(), chosen=st.sets(st.integers(0, 3)), start=st.integers(0, 8))
def test_going_on_changes_beginning_ranks_only(found: Job, chosen: set[int], start: int) -> None:
    if not found.survivors:
        return
    replay = UnderWay(Window(WindowName(start, 'plan'), 1), found.target)
    reports = [
        msgspec.structs.replace(report, under_way=replay, clean_at=NOWHERE)
        if report.survivor and stage in chosen
        else report
        for report, stage in zip(found.reports, found.stage_of, strict=True)
    ]
    found = found._replace(reports=reports)
    plain = [msgspec.structs.replace(report, under_way=None) for report in reports]
    before, verdict = found._replace(reports=plain).verdict(), found.verdict()
    if isinstance(verdict, WholeJob):
        assert before == verdict
        return
    stay = {found.stage_of[rank] for rank in verdict.going_on}
    begin = verdict.stages - stay
    if isinstance(before, Localized):
        same = verdict.target, verdict.stages, verdict.ranks, verdict.replacements
        assert same == (before.target, before.stages, before.ranks, before.replacements)
    assert stay <= chosen
    assert not any(abs(one - other) == 1 for one in stay for other in begin)
    assert not (found.tied_stages & stay and found.tied_stages & begin)
    assert (
        not begin
        or verdict.window is not None
        and verdict.window.start >= min([start] if stay else [0])
    )


# Connections at the end of the replays

WAITS, BEGINS = 'waits', 'begins'


@pytest.mark.parametrize('ranks', [1, 2, 3, 4])
def test_connected_sets_partition_the_ranks(ranks: int) -> None:
    for does in product((WAITS, BEGINS, 4, 5), repeat=ranks):
        going_on = frozenset(rank for rank, what in enumerate(does) if isinstance(what, int))
        replays = going_on | {rank for rank, what in enumerate(does) if what == BEGINS}
        verdict = Localized(target=9, ranks=replays, window=NEW, going_on=going_on)
        reports = [
            replays_since(UnderWay(NEW, 9, what)) if isinstance(what, int) else survivor(9)
            for what in does
        ]
        found = [verdict.connected_with(rank, reports) for rank in range(ranks)]
        for rank, others in enumerate(found):
            assert rank in others
            assert {does[other] for other in others} == {does[rank]}
            assert all(found[other] == others for other in others)


# Histories: a node that was away comes back with parts of windows of an earlier one

START = 6
FIRST = History(drawn_history())
SECOND = FIRST.after(FIRST.window(0, PLAN))


def on_disk(root: Path, rank: int, history: History) -> list[HeldWindow]:
    file = make_file(root / f'memory{rank}', START, history.window(START, PLAN).plan, owner=rank)
    (root / f'node{rank}').mkdir()
    disk = DiskWindows(root / f'node{rank}', 'run', rank)
    disk.write(file, identity_of(rank))
    store = NodeStore(root, 'run', f'node{rank}')
    found = take_stock(store, disk, identity_of(rank)).disk
    disk.close()
    store.close()
    return found


@pytest.mark.parametrize('alike', [True, False])
def test_parts_on_disk_join_only_within_a_history(alike: bool, tmp_path: Path) -> None:
    held = on_disk(tmp_path, 0, SECOND) + on_disk(tmp_path, 1, SECOND if alike else FIRST)
    assert len(held) == 2
    assert len(candidates(held, 2)) == alike


def test_the_later_history_is_taken_of_two_whole_windows() -> None:
    windows = [Window(history.window(START, PLAN), 3) for history in (FIRST, SECOND)]
    assert candidates(everywhere(2, *windows), 2) == windows[::-1]


def in_history(history: History, *windows: Window, lost: int = 2) -> list[Report]:
    """Of three stages one is lost, and its node has parts of other histories."""
    reports = [survivor(9, windows=everywhere(3, *windows)) for _ in range(3)]
    reports = [msgspec.structs.replace(report, history=history) for report in reports]
    reports[lost] = replacement()
    return reports


PAST, PRESENT, AWAY = (f'{number:016x}' for number in (1, 2, 3))
BASE = Window(WindowName(2, f'{PAST}_plan'), 1)


@pytest.mark.parametrize(
    ('start', 'history', 'taken'),
    [
        (6, PRESENT, True),
        (6, PAST, False),
        (6, AWAY, False),
        (2, PAST, True),
        (1, PAST, True),
        (2, AWAY, False),
    ],
)
def test_whole_windows_of_another_history_are_not_taken(
    start: int, history: str, taken: bool
) -> None:
    window = Window(WindowName(start, f'{history}_plan'), 1)
    verdict = Job(in_history(History(PRESENT, BASE.name), window), [0, 1, 2]).verdict()
    assert isinstance(verdict, Localized) == taken
    if isinstance(verdict, Localized):
        assert verdict.window == window


@pytest.mark.parametrize(
    ('stage_of', 'together', 'goes_back'),
    [([0, 1, 2], False, False), ([0, 1, 2], True, True), ([0, 0, 0], False, True)],
)
def test_a_history_begins_where_no_stage_keeps_its_state(
    stage_of: list[int], together: bool, goes_back: bool
) -> None:
    present = History(PRESENT, BASE.name)
    reports = in_history(present, BASE)
    verdict = localized(decide_recovery(reports, stage_of, (), LAST, together=together))
    begun = verdict.history_after(reports)
    assert begun == (present.after(BASE.name) if goes_back else present)
    reports[0] = msgspec.structs.replace(reports[0], history=begun)
    unharmed = msgspec.structs.replace(verdict, window=None)
    assert unharmed.history_after(reports) == begun, 'not all had heard of it when the next came'
