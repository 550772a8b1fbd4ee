# SPDX-License-Identifier: Apache-2.0
"""Verdict after a failure: lost ranks, the iteration that counts, and the stages to replay.

The verdict is a pure function of all ranks' reports, so that every rank reaches the same verdict
without another exchange (paper section 3.4; DESIGN: the newest committed iteration wins).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from moevement_ext.errors import EXIT_OTHER_BITS, EXIT_WHOLE_JOB
from moevement_ext.membership.report import NOWHERE, Report, UnderWay
from moevement_ext.memory.window.name import History, Window
from moevement_ext.recover.inventory import candidates

# Longest list of ranks in one message.
_MOST_LISTED = 4


class Localized(msgspec.Struct, frozen=True, kw_only=True):
    """Some or all stages replay in living processes; the other stages keep their state."""

    target: int
    """The newest committed iteration, from which all ranks continue."""
    stages: frozenset[int] = frozenset()
    """Stages that replay; empty if no rank lost its state."""
    ranks: frozenset[int] = frozenset()
    """All ranks of those stages."""
    replacements: frozenset[int] = frozenset()
    """Ranks with a new process."""
    window: Window | None = None
    """Window at the start of the replay; None without a replay."""
    copies: dict[int, int] = {}
    """Source rank by rank, for ranks that copy their whole state from a replica."""
    going_on: frozenset[int] = frozenset()
    """Members of `ranks` whose replay continues: this failure affects neither their stage nor a
    neighbour. They began from their own window; `window` applies to the other ranks."""
    together: bool = False
    """All stages replay, connected by the pipeline; no log is read or written."""

    @property
    def beginning(self) -> frozenset[int]:
        """Ranks that begin to replay from `window`."""
        return self.ranks - self.going_on

    def connected_with(self, rank: int, reports: Sequence[Report]) -> frozenset[int]:
        """Return the ranks, including `rank`, connected with `rank` when the replay ends.

        These sets partition the ranks. The verdict is the newest one, from `reports`; replays that
        continue are connected since they began.
        """
        if rank in self.beginning:
            return self.beginning
        if rank in self.going_on:
            began = [report.under_way and report.under_way.round for report in reports]
            return frozenset(other for other in self.going_on if began[other] == began[rank])
        return frozenset(range(len(reports))) - self.ranks

    def history_after(self, reports: Sequence[Report]) -> History:
        """The history in which all ranks go on: another one if all stages go back."""
        present = survivors_history(reports)
        if self.window is None or len(self.beginning) < len(reports):
            return present
        return present.after(self.window.name)


class WholeJob(msgspec.Struct, frozen=True):
    """All workers end, as no survivor can help or no rank survived, and are restarted."""

    reason: str
    code: int = EXIT_WHOLE_JOB
    """Exit status; another one ends the job for good."""


Verdict = Localized | WholeJob


def decide_recovery(
    reports: Sequence[Report],
    stage_of: Sequence[int],
    tied: Collection[int],
    last_iteration: int,
    replicas: Sequence[Sequence[int]] = (),
    interleaved: bool = False,
    together: bool = False,
) -> Verdict:
    """Decide the recovery from a failure.

    Args:
        reports: of all ranks, by rank.
        stage_of: pipeline stage by rank.
        tied: stages that share weights, the first and the last for the embedding: they replay
            together.
        last_iteration: iteration at which training ends; no stage can recover after it.
        replicas: for each rank, the ranks that hold the same state (data parallelism without a
            sharded optimizer); empty without such redundancy.
        interleaved: ranks hold several stages in turn, so that the last sends to the first.
        together: if one stage rolls back, all stages do.
    """
    survivors = [report for report in reports if report.survivor]
    if not survivors:
        return WholeJob('no worker survived')
    if differing := [f'rank {n}: {r.other_bits}' for n, r in enumerate(reports) if r.other_bits]:
        return WholeJob('; '.join(differing[:_MOST_LISTED]), EXIT_OTHER_BITS)
    strangers = _strangers(reports)
    if strangers:
        return WholeJob(
            f'the new process of rank {", ".join(map(str, strangers))} does not know the secret of '
            'the job: set the same MOEVEMENT_SECRET on all nodes'
        )
    target = max(report.committed for report in survivors)
    if target == NOWHERE:
        return WholeJob('nothing is committed yet')
    behind = [
        rank
        for rank, report in enumerate(reports)
        if not report.survivor or report.clean_at != target
    ]
    replacements = frozenset(r for r, report in enumerate(reports) if not report.survivor)
    if behind and target >= last_iteration:
        return WholeJob(f'iteration {target} was the last one')
    copies = {} if together else _copies(behind, replicas, stage_of)
    lost = {stage_of[rank] for rank in behind if rank not in copies}
    if lost and together:
        lost = set(stage_of)
    stages = frozenset(lost | set(tied) if lost & set(tied) else lost)
    copies = {rank: replica for rank, replica in copies.items() if stage_of[rank] not in stages}
    ranks = frozenset(rank for rank, stage in enumerate(stage_of) if stage in stages)
    if not stages:
        return Localized(target=target, replacements=replacements, copies=copies)
    job = _JobState(reports, target, stage_of, frozenset(tied), interleaved)
    window, going_on = _replays(job, stages)
    if isinstance(window, str):
        return WholeJob(window)
    return Localized(
        target=target,
        stages=stages,
        ranks=ranks,
        replacements=replacements,
        window=window,
        copies=copies,
        going_on=job.ranks_of(going_on),
        together=together,
    )


def survivors_history(reports: Sequence[Report]) -> History:
    """The survivors' history. If a failure cut a change of it off, the later one is in force."""
    present = (report.history for report in reports if report.survivor)
    return max(present, key=lambda history: history.name)


def _strangers(reports: Sequence[Report]) -> list[int]:
    """Ranks whose new process does not have the survivors' secret."""
    known = {mark for report in reports if report.survivor for mark in report.marks}
    return [
        rank
        for rank, report in enumerate(reports)
        if known and not report.survivor and not known & set(report.marks)
    ]


def _copies(
    behind: Sequence[int], replicas: Sequence[Sequence[int]], stage_of: Sequence[int]
) -> dict[int, int]:
    """An up-to-date replica for each rank behind, in stages where all such ranks have one."""
    found = {
        rank: next((replica for replica in replicas[rank] if replica not in behind), NOWHERE)
        for rank in behind
        if replicas
    }
    replaying = {stage_of[rank] for rank in behind if found.get(rank, NOWHERE) == NOWHERE}
    return {rank: replica for rank, replica in found.items() if stage_of[rank] not in replaying}


class _JobState(NamedTuple):
    """Reports of all ranks, and dependencies between stages in a replay to `target`."""

    reports: Sequence[Report]
    target: int
    stage_of: Sequence[int]
    tied: frozenset[int]
    interleaved: bool

    def ranks_of(self, stages: Collection[int]) -> frozenset[int]:
        return frozenset(rank for rank, stage in enumerate(self.stage_of) if stage in stages)

    def neighbours(self, stages: Collection[int]) -> set[int]:
        """Other stages whose logs `stages` read."""
        found = {stage + step for stage in stages for step in (-1, 1)}
        ends = {min(self.stage_of), max(self.stage_of)}
        if self.interleaved and ends & set(stages):
            found |= ends
        return found - set(stages)


def _replays(job: _JobState, stages: frozenset[int]) -> tuple[Window | str, frozenset[int]]:
    """Return the window of new replays, or why there is none; and stages whose replay continues.

    A replay continues if all ranks of its stage are replaying, none of its inputs is produced
    again, and its sends reach back to the window of the stages that begin now: a later failure
    then finds the same range of iterations in all logs.
    """
    under_way = _under_way(job, stages)
    going_on = frozenset(under_way)
    while True:
        going_on = _undisturbed(job, stages, going_on, under_way)
        begin = stages - going_on
        if not begin:  # no stage needs a window
            return min(found.window for found in under_way.values()), going_on
        window = _window(job, begin)
        if isinstance(window, str):
            return window, going_on
        too_late = {stage for stage in going_on if under_way[stage].window.start > window.start}
        if not too_late:
            return window, going_on
        going_on -= too_late


def _under_way(job: _JobState, stages: frozenset[int]) -> dict[int, UnderWay]:
    """Replays to `target` that all ranks of a stage are executing, by stage."""
    found = {}
    for stage in stages:
        first, *others = {job.reports[rank].under_way for rank in job.ranks_of([stage])}
        if first is not None and not others and first.target == job.target:
            found[stage] = first
    return found


def _undisturbed(
    job: _JobState,
    stages: frozenset[int],
    going_on: frozenset[int],
    under_way: Mapping[int, UnderWay],
) -> frozenset[int]:
    """Stages of `going_on` that read no log which begins from scratch, or is lost.

    Records that a log has dropped since the stages began belong to iterations that they have
    replayed: a newer window is persisted on all ranks then, theirs included.

    If no process was lost, some wait has timed out, and two neighbours that both replay may wait
    for each other: they begin again, and such recoveries are counted (see `fruitless`).
    """
    none_lost = all(report.survivor for report in job.reports)

    def is_disturbed(stage: int) -> bool:
        begin = stages - going_on
        neighbours = job.neighbours([stage])
        if none_lost and neighbours & going_on:
            return True
        if neighbours & begin or (stage in job.tied and job.tied & begin):
            return True
        reads = under_way[stage].window.start < under_way[stage].target
        around = job.ranks_of(neighbours - stages)
        return reads and any(job.reports[rank].first_logged == NOWHERE for rank in around)

    while disturbed := frozenset(filter(is_disturbed, going_on)):
        going_on -= disturbed
    return going_on


def _window(job: _JobState, stages: frozenset[int]) -> Window | str:
    """Return the newest window that `stages` can convert, or why there is none.

    It must be complete on *all* ranks, including those that do not replay: their logs, and
    those that the replay fills again, then reach back equally far for the next failure. And it must
    be of the survivors' history: a node that was away may have whole windows of another one.
    """
    of_nodes = {
        id(report.windows): report.windows for report in job.reports
    }  # one object: decode_all
    held = {part for windows in of_nodes.values() for part in windows}
    refused = {candidate for report in job.reports for candidate in report.refused}
    complete = [c for c in candidates(held, len(job.reports)) if c not in refused]
    lineage = survivors_history(job.reports)
    reachable = [c for c in complete if c.dense_at <= job.target and lineage.includes(c.name)]
    if not reachable:
        return 'no window is complete on all ranks'
    logs = [job.reports[rank].first_logged for rank in job.ranks_of(job.neighbours(stages))]
    for candidate in reachable:
        if candidate.start == job.target or all(
            NOWHERE < first <= candidate.start + 1 for first in logs
        ):
            return candidate
    return 'the logs of the neighbouring stages do not reach back to any window'
