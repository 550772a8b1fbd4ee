# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moevement_ext.errors import EXIT_OTHER_BITS
from moevement_ext.membership.report import NOWHERE, Report
from moevement_ext.memory.window.name import HeldWindow, Window, WindowName
from moevement_ext.recover.inventory import candidates, holders
from moevement_ext.recover.verdict import Localized, Verdict, WholeJob, decide_recovery

LAST = 1000
"""At which training ends, far from the iterations of these tests."""
ITERATIONS = st.integers(0, 12)
NAMES = st.builds(WindowName, ITERATIONS, st.just('plan'))


class Job(NamedTuple):
    reports: list[Report]
    stage_of: list[int]
    tied: bool = False
    interleaved: bool = False

    def verdict(self, last_iteration: int = LAST) -> Verdict:
        return decide_recovery(
            self.reports,
            self.stage_of,
            self.tied_stages,
            last_iteration,
            interleaved=self.interleaved,
        )

    @property
    def tied_stages(self) -> set[int]:
        return {min(self.stage_of), max(self.stage_of)} if self.tied else set()

    @property
    def survivors(self) -> list[int]:
        return [rank for rank, report in enumerate(self.reports) if report.survivor]

    @property
    def target(self) -> int:
        return max(self.reports[rank].committed for rank in self.survivors)

    def logs_of(self, stages: set[int]) -> list[int]:
        return [
            report.first_logged
            for report, stage in zip(self.reports, self.stage_of, strict=True)
            if stage in stages
        ]

    def usable(self, window: Window) -> bool:
        """Could be converted, as far as the windows are concerned."""
        held = {part for report in self.reports for part in report.windows}
        return (
            all(HeldWindow(window, owner) in held for owner in range(len(self.reports)))
            and not any(window in report.refused for report in self.reports)
            and window.dense_at <= self.target
        )

    def all_windows(self) -> set[Window]:
        return {part.window for report in self.reports for part in report.windows}


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Up to four stages of one or two ranks; of some windows a part is missing."""
    stage_of = draw(
        st.tuples(st.integers(1, 4), st.integers(1, 2)).map(
            lambda shape: [stage for stage in range(shape[0]) for _ in range(shape[1])]
        )
    )
    ranks = range(len(stage_of))
    newest = draw(ITERATIONS)
    windows = draw(st.lists(st.builds(Window, NAMES, st.integers(1, 3))))
    parts = [HeldWindow(window, owner) for window in windows for owner in ranks]
    missing = draw(st.sets(st.sampled_from(parts), max_size=2)) if parts else set()
    inventories: list[list[HeldWindow]] = [[] for _ in ranks]
    for part in parts:
        if part not in missing:
            inventories[draw(st.sampled_from(ranks))].append(part)
    reports = [draw(reports_of(newest, windows, inventory)) for inventory in inventories]
    return Job(reports, stage_of, draw(st.booleans()), draw(st.booleans()))


@st.composite
def reports_of(
    draw: st.DrawFn, newest: int, windows: Sequence[Window], inventory: list[HeldWindow]
) -> Report:
    if draw(st.integers(0, 3)) == 0:
        return replacement(inventory, committed=draw(st.integers(NOWHERE, newest + 3)))
    committed = max(newest - draw(st.sampled_from([0, 0, 0, 1])), 0)
    refused = draw(st.sets(st.sampled_from(windows), max_size=1)) if windows else set()
    return survivor(
        committed,
        clean_at=draw(st.sampled_from([committed, committed, committed, NOWHERE])),
        first_logged=draw(st.sampled_from([NOWHERE, 1, 1, 1, 2, 4, 7])),
        windows=inventory,
        refused=list(refused),
    )


def survivor(
    committed: int,
    clean_at: int | None = None,
    first_logged: int = 1,
    windows: Sequence[HeldWindow] = (),
    refused: Sequence[Window] = (),
) -> Report:
    return Report(
        survivor=True,
        node='node',
        process=1,
        windows=list(windows),
        origin=0,
        committed=committed,
        clean_at=committed if clean_at is None else clean_at,
        first_logged=first_logged,
        refused=list(refused),
    )


def replacement(windows: Sequence[HeldWindow] = (), committed: int = NOWHERE) -> Report:
    return Report(
        survivor=False, node='node', process=2, windows=list(windows), committed=committed
    )


def everywhere(world_size: int, *windows: Window) -> list[HeldWindow]:
    return [HeldWindow(window, owner) for window in windows for owner in range(world_size)]


OLD, NEW = Window(WindowName(2, 'plan'), 3), Window(WindowName(6, 'plan'), 3)


def localized(verdict: Verdict) -> Localized:
    assert isinstance(verdict, Localized), verdict
    return verdict


# Complete windows and their holders


PARTS = st.builds(
    HeldWindow,
    st.builds(
        Window,
        st.builds(WindowName, st.integers(0, 6), st.sampled_from(['plan-a', 'plan-b'])),
        st.integers(1, 4),
    ),
    st.integers(0, 2),
)
INVENTORIES = st.lists(st.sets(PARTS, max_size=20), min_size=3, max_size=3)


@given(inventories=INVENTORIES)
def test_candidates_are_whole_and_in_order(
    inventories: list[set[HeldWindow]],
) -> None:
    held = set[HeldWindow]().union(*inventories)
    found = candidates(held, 3)
    whole = [p.window for p in held if all(HeldWindow(p.window, n) in held for n in range(3))]
    assert len(found) == len(set(found)) and set(found) == set(whole)
    dense = [one.dense_at for one in found]
    assert dense == sorted(dense, reverse=True)


@given(inventories=INVENTORIES, wanted=PARTS)
def test_holders_begin_with_the_owner(
    inventories: list[set[HeldWindow]], wanted: HeldWindow
) -> None:
    found = holders(wanted.window, wanted.owner, inventories)
    assert set(found) == {rank for rank in range(3) if wanted in inventories[rank]}
    assert found == sorted(found, key=lambda rank: (rank != wanted.owner, rank))


# Replaying stages


@given(jobs())
def test_other_bits_of_one_rank_end_the_job(job: Job) -> None:
    reports = [*job.reports]
    for rank in job.survivors[:1]:
        reports[rank] = msgspec.structs.replace(reports[rank], other_bits='expert.0')
        told = WholeJob(f'rank {rank}: expert.0', EXIT_OTHER_BITS)
        assert job._replace(reports=reports).verdict() == told


@given(job=jobs())
def test_the_newest_committed_iteration_wins(job: Job) -> None:
    verdict = job.verdict()
    if isinstance(verdict, Localized):
        assert verdict.target == job.target


@given(job=jobs())
def test_exactly_the_stages_that_lost_something_replay_whole(job: Job) -> None:
    verdict = job.verdict()
    if isinstance(verdict, WholeJob):
        return
    lost = {
        stage
        for report, stage in zip(job.reports, job.stage_of, strict=True)
        if not report.survivor or report.clean_at != verdict.target
    }
    ends = {0, max(job.stage_of)}
    assert verdict.stages == (lost | ends if job.tied and lost & ends else lost)
    assert verdict.ranks == {r for r, stage in enumerate(job.stage_of) if stage in verdict.stages}
    assert verdict.replacements == set(range(len(job.reports))) - set(job.survivors)
    assert verdict.replacements <= verdict.ranks


@pytest.mark.parametrize(
    'behind',
    [survivor(8), survivor(9, NOWHERE), replacement(committed=10)],
    ids=['missed the last update', 'torn update', 'commits of a lost process do not count'],
)
def test_stage_of_a_rank_without_the_newest_state_replays(behind: Report) -> None:
    reports = [survivor(9, windows=everywhere(4, OLD)), survivor(9), behind, survivor(9)]
    verdict = localized(Job(reports, [0, 0, 1, 1]).verdict())
    assert (verdict.target, verdict.stages, verdict.ranks) == (9, {1}, {2, 3})
    assert verdict.replacements == (set() if behind.survivor else {2})


# What the replay starts from


@given(job=jobs())
@example(job=Job([survivor(3), replacement(everywhere(2, Window(WindowName(3, 'a'), 1)))], [0, 1]))
@example(job=Job([survivor(9, None, NOWHERE, everywhere(2, NEW)), replacement()], [0, 1]))
@example(
    job=Job(
        [replacement(everywhere(3, NEW)), survivor(9), survivor(9, first_logged=8)],
        [0, 1, 2],
        interleaved=True,
    )
)
def test_newest_usable_window_is_taken_or_the_whole_job_restarts(job: Job) -> None:
    """It is whole everywhere, refused nowhere, dense in time, and in the logs around."""
    verdict = job.verdict()
    if not job.survivors:
        assert verdict == WholeJob('no worker survived')
        return
    lost, last = _lost_stages(job), max(job.stage_of)
    around = {stage + step for stage in lost for step in (-1, 1)} - lost
    if job.interleaved and lost & {0, last}:  # the last one sends to the first
        around |= {0, last} - lost
    logs = job.logs_of(around)
    usable = [window for window in job.all_windows() if job.usable(window)]
    reached = [
        window
        for window in usable
        if window.start == job.target or all(0 <= first <= window.start + 1 for first in logs)
    ]
    if not lost:
        assert localized(verdict).window is None
    elif reached:
        newest = max(reached, key=lambda window: (window.dense_at, window))
        assert localized(verdict).window == newest
    else:
        assert verdict == WholeJob(
            'the logs of the neighbouring stages do not reach back to any window'
            if usable
            else 'no window is complete on all ranks'
        )


def _lost_stages(job: Job) -> set[int]:
    lost = {
        stage
        for report, stage in zip(job.reports, job.stage_of, strict=True)
        if not report.survivor or report.clean_at != job.target
    }
    ends = {0, max(job.stage_of)}
    return lost | ends if job.tied and lost & ends else lost


@given(job=jobs(), order=st.randoms())
def test_order_of_inventories_does_not_matter(job: Job, order: object) -> None:
    shuffled = []
    for report in job.reports:
        windows = [*report.windows]
        order.shuffle(windows)  # type: ignore[attr-defined]
        shuffled.append(msgspec.structs.replace(report, windows=windows))
    assert job._replace(reports=shuffled).verdict() == job.verdict()


# Ranks that hold the same state


def decide_with_replicas(job: Job) -> Verdict:
    replicas = [
        [r for r, other in enumerate(job.stage_of) if other == stage] for stage in job.stage_of
    ]
    return decide_recovery(job.reports, job.stage_of, job.tied_stages, LAST, replicas)


@given(job=jobs())
def test_a_rank_copies_from_a_replica_or_its_stage_replays(job: Job) -> None:
    verdict = decide_with_replicas(job)
    if isinstance(verdict, WholeJob):
        return
    behind = {r for r, report in enumerate(job.reports) if report.clean_at != verdict.target}
    assert verdict.copies.keys() == behind - verdict.ranks
    for rank, replica in verdict.copies.items():
        assert replica not in behind and job.stage_of[replica] == job.stage_of[rank]
    whole = {stage for r, stage in enumerate(job.stage_of) if r not in behind}
    lost = set(job.stage_of) - whole
    ends = {0, max(job.stage_of)}
    assert verdict.stages == (lost | ends if job.tied and lost & ends else lost)


def test_a_stage_replays_whole_if_one_of_its_ranks_has_no_replica_left() -> None:
    held = everywhere(4, NEW)
    reports = [survivor(9, windows=held), replacement(), replacement(), survivor(9)]
    replicas = [[0, 1], [0, 1], [2], [3]]
    verdict = localized(decide_recovery(reports, [0, 0, 0, 1], (), LAST, replicas))
    assert (verdict.stages, verdict.copies) == ({0}, {})


# Whole job


def test_no_rank_recovers_after_the_last_iteration() -> None:
    reports = [survivor(9, windows=everywhere(2, NEW)), replacement()]
    assert localized(Job(reports, [0, 1]).verdict(10)).target == 9
    assert Job(reports, [0, 1]).verdict(9) == WholeJob('iteration 9 was the last one')


def test_new_process_is_never_clean_even_before_the_first_commit() -> None:
    reports = [survivor(NOWHERE, clean_at=NOWHERE), replacement()]
    for replicas in ((), [(0, 1), (0, 1)]):  # nor is a state copied that belongs to no iteration
        verdict = decide_recovery(reports, [0, 0], (), LAST, replicas)
        assert isinstance(verdict, WholeJob)


# Known processes


def known(survivor: bool, *marks: bytes) -> Report:
    found = Report(survivor, 'node', 1, [], marks=list(marks))
    return msgspec.structs.replace(found, committed=5, clean_at=5 if survivor else NOWHERE)


def test_unknown_new_process_restarts_the_whole_job() -> None:
    of_job, other = b'of job', b'other'
    for marks in ((), (other,)):
        reports = [known(True, of_job), known(False, *marks)]
        verdict = decide_recovery(reports, [0, 0], (), LAST, replicas=[(1,), (0,)])
        assert isinstance(verdict, WholeJob) and 'rank 1 does not know the secret' in verdict.reason
    for survivors, marks in (((of_job,), (other, of_job)), ((), ())):
        reports = [known(True, *survivors), known(False, *marks)]
        verdict = decide_recovery(reports, [0, 0], (), LAST, replicas=[(1,), (0,)])
        assert isinstance(verdict, Localized) and verdict.copies == {1: 0}
