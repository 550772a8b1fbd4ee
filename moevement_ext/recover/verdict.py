# SPDX-License-Identifier: Apache-2.0
"""After a failure: who is gone, which iteration counts, and which stages have to replay.

A pure function of what all ranks reported when they met, so every rank comes to the same verdict
without another exchange (paper section 3.4; DESIGN: the newest committed iteration wins).
"""

from collections.abc import Collection, Sequence

import msgspec

from moevement_ext.membership.report import NOWHERE, Report
from moevement_ext.memory.window.name import Window
from moevement_ext.recover.inventory import candidates


class Localized(msgspec.Struct, frozen=True):
    """Some stages replay, the others keep their state."""

    target: int
    """The newest committed iteration: everybody goes on from there."""
    stages: frozenset[int]
    """Stages that replay; empty if nobody lost anything."""
    ranks: frozenset[int]
    """All ranks of those stages."""
    replacements: frozenset[int]
    """Ranks whose process is new."""
    window: Window | None
    """What the replay starts from; None if nothing is replayed."""
    copies: dict[int, int] = {}
    """Ranks that take their whole state from a peer that holds the same, by rank."""


class WholeJob(msgspec.Struct, frozen=True):
    """Survivors cannot help, or none survived: everybody starts again."""

    reason: str


Verdict = Localized | WholeJob


def decide_recovery(
    reports: Sequence[Report],
    stage_of: Sequence[int],
    tied: Collection[int],
    last_iteration: int,
    replicas: Sequence[Sequence[int]] = (),
    interleaved: bool = False,
) -> Verdict:
    """What happens after the failure.

    Args:
        reports: by rank.
        stage_of: pipeline stage by rank.
        tied: stages that share weights, first and last one those of the embedding: they replay
            together.
        last_iteration: at which training ends; a stage cannot come back after it.
        replicas: for each rank, the ranks that hold the same state (data parallelism without a
            sharded optimizer); empty if there is no such redundancy.
        interleaved: ranks hold several stages in turn, so that the last sends to the first.
    """
    survivors = [report for report in reports if report.survivor]
    if not survivors:
        return WholeJob('no worker survived')
    strangers = _strangers(reports)
    if strangers:
        return WholeJob(
            f'the new process of rank {", ".join(map(str, strangers))} does not know the secret of '
            'the job, which lies on the nodes that it began on: set MOEVEMENT_SECRET, the same on '
            'all nodes, and a lost node costs no more than its stages'
        )
    target = max(report.committed for report in survivors)
    if target == NOWHERE:
        return WholeJob('nothing is committed yet')
    if any(report.unjudged for report in survivors):
        return WholeJob('the recovery that was under way has not been verified')
    behind = [
        rank
        for rank, report in enumerate(reports)
        if not report.survivor or report.clean_at != target
    ]
    replacements = frozenset(r for r, report in enumerate(reports) if not report.survivor)
    if behind and target >= last_iteration:
        return WholeJob(f'iteration {target} was the last one')
    copies = _copies(behind, replicas, stage_of)
    lost = {stage_of[rank] for rank in behind if rank not in copies}
    stages = frozenset(lost | set(tied) if lost & set(tied) else lost)
    copies = {rank: replica for rank, replica in copies.items() if stage_of[rank] not in stages}
    ranks = frozenset(rank for rank, stage in enumerate(stage_of) if stage in stages)
    if not stages:
        return Localized(target, stages, ranks, replacements, None, copies)
    window = _window(reports, target, ranks, stage_of, interleaved)
    if isinstance(window, str):
        return WholeJob(window)
    return Localized(target, stages, ranks, replacements, window, copies)


def _strangers(reports: Sequence[Report]) -> list[int]:
    """Ranks whose new process has nothing by which the survivors would know it."""
    known = {mark for report in reports if report.survivor for mark in report.marks}
    return [
        rank
        for rank, report in enumerate(reports)
        if known and not report.survivor and not known & set(report.marks)
    ]


def _copies(
    behind: Sequence[int], replicas: Sequence[Sequence[int]], stage_of: Sequence[int]
) -> dict[int, int]:
    """A replica that is not behind for each rank that is, in stages where all of them have one."""
    found = {
        rank: next((replica for replica in replicas[rank] if replica not in behind), NOWHERE)
        for rank in behind
        if replicas
    }
    replaying = {stage_of[rank] for rank in behind if found.get(rank, NOWHERE) == NOWHERE}
    return {rank: replica for rank, replica in found.items() if stage_of[rank] not in replaying}


def _window(
    reports: Sequence[Report],
    target: int,
    ranks: frozenset[int],
    stage_of: Sequence[int],
    interleaved: bool,
) -> Window | str:
    """The newest window that can be converted, or why there is none.

    It must be complete on *all* ranks, also on those that do not replay: their logs and those that
    the replay makes anew then reach back equally far, and the next failure finds what it needs.
    """
    of_nodes = {id(report.windows): report.windows for report in reports}  # one object: decode_all
    held = {part for windows in of_nodes.values() for part in windows}
    refused = {candidate for report in reports for candidate in report.refused}
    complete = [c for c in candidates(held, len(reports)) if c not in refused]
    reachable = [c for c in complete if c.dense_at <= target]
    if not reachable:
        return 'no window is complete on all ranks'
    stages = {stage_of[rank] for rank in ranks}
    neighbours = {stage + step for stage in stages for step in (-1, 1)} - stages
    ends = {min(stage_of), max(stage_of)}
    if interleaved and stages & ends:
        neighbours |= ends - stages
    logs = [
        report.first_logged for rank, report in enumerate(reports) if stage_of[rank] in neighbours
    ]
    for candidate in reachable:
        if candidate.start == target or all(
            NOWHERE < first <= candidate.start + 1 for first in logs
        ):
            return candidate
    return 'the logs of the neighbouring stages do not reach back to any window'
