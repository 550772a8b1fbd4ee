# SPDX-License-Identifier: Apache-2.0
"""Results of the demo: for people (tables, a picture), for programs (one line).

Checks in the events that exactly one pipeline stage rolled back.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from moevement_ext.events import Event, FailureDetected, Recovered, RecoveryStarted
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.slot import SlotHeader, decode_context
from tools.chaos.verdict import problems, recoveries, replaced
from tools.lab import tables
from tools.lab.errors import LabError
from tools.lab.evidence import kind_of, ranks_with
from tools.lab.four_ranks import STAGE_RANKS, WORLD_SIZE
from tools.lab.plots import Doing, Failure, Span
from tools.lab.run_log import Iteration
from tools.lab.trained import Trained

MIB = 1 << 20
WARM_UP_ITERATIONS = 5
PHASES = ('detect', 'unblock', 'respawn', 'regroup', 'fetch', 'convert', 'catch_up')


class CapturedBytes(NamedTuple):
    """Bytes that one rank captured in one window."""

    slots: list[int]
    """Payload of each slot."""
    dense: int
    """Bytes of a dense checkpoint of this rank: full state of every operator."""


def captured_bytes(store: NodeStore) -> dict[int, CapturedBytes]:
    """Captured bytes by rank, from the newest windows that a node holds, replicas included."""
    newest: dict[int, CapturedBytes] = {}
    for window in store.scan():  # newest first
        if window.owner not in newest:
            newest[window.owner] = _window_bytes(WindowFile.open(window.path).headers())
    return newest


def _window_bytes(headers: Sequence[SlotHeader]) -> CapturedBytes:
    dense = 0
    for header in headers:
        full = set(decode_context(header.context).full)
        dense += sum(record.nbytes for record in header.records if record.operator in full)
    return CapturedBytes([header.payload_bytes for header in headers], dense)


# ---- the recovery


class LocalizedRecovery(NamedTuple):
    """The recovery of the job."""

    lost: int
    """The stage that lost its state."""
    replayed: list[int]
    """Number of iterations computed again, by stage."""
    phases: list[dict[str, float]]
    """Seconds by phase, on the slowest rank of each phase, by stage."""
    new: Iteration
    """First new iteration in the log."""
    seconds: float
    """Seconds from the kill until `new`."""
    spans: list[list[Span]]
    """Activity of each stage until it has recovered; the lost stage also starts and replays."""


def all_recovered(events: Sequence[Event]) -> bool:
    return ranks_with(events, Recovered) >= set(range(WORLD_SIZE))


def localized_recovery(disturbed: Trained, lost: int) -> LocalizedRecovery:
    """Check that the recovery was localized, and read it from the events.

    Raises:
        LabError: another stage lost its state as well, or the job did not continue.
    """
    events, killed_at = disturbed.events, disturbed.hurt_at
    assert killed_at is not None
    wrong = problems(events, WORLD_SIZE, 1, [])
    for one in recoveries(events, WORLD_SIZE):
        new_ranks = replaced(one)
        if (one.scope, one.stages, new_ranks) != ('localized', [lost], list(STAGE_RANKS[lost])):
            wrong.append(f'{one.scope}, stages {one.stages}, new processes of ranks {new_ranks}')
    if wrong or len(disturbed.log.attempts) != 1:
        why = '; '.join(wrong) or f'the last rank has had {len(disturbed.log.attempts)} attempts'
        raise LabError(f'the recovery was not localized: {why}; see the logs and events of the run')
    by_rank = {event.rank: event for event in kind_of(events, Recovered)}
    target = max(event.target for event in by_rank.values() if isinstance(event.target, int))
    new = disturbed.log.first_after(target)
    by_stage = [[by_rank[rank] for rank in ranks] for ranks in STAGE_RANKS]
    return LocalizedRecovery(
        lost,
        [max(event.replayed for event in reports) for reports in by_stage],
        [
            {name: max(event.seconds[name] for event in reports) for name in PHASES}
            for reports in by_stage
        ],
        new,
        new.time - killed_at,
        [
            _spans(disturbed.events, killed_at, ranks, stage == lost)
            for stage, ranks in enumerate(STAGE_RANKS)
        ],
    )


def _spans(
    events: Sequence[Event], killed_at: float, ranks: Sequence[int], lost: bool
) -> list[Span]:
    """Spans of a stage's slowest rank. A surviving stage waits once it has noticed the failure."""
    recent = [event for event in events if event.rank in ranks and event.time > killed_at]
    back = max(event.time for event in kind_of(recent, Recovered))
    if not lost:
        noticed = min(event.time for event in kind_of(recent, FailureDetected))
        return [Span(Doing.WAITING, noticed, back)]
    replay = max(event.time for event in kind_of(recent, RecoveryStarted))
    return [Span(Doing.STARTING, killed_at, replay), Span(Doing.REPLAYING, replay, back)]


def story(disturbed: Trained, found: LocalizedRecovery) -> Failure:
    log, killed_at = disturbed.log, disturbed.hurt_at
    assert killed_at is not None
    before = [iteration for iteration in log.iterations if iteration.time <= killed_at]
    began = log.iterations[0].time - log.iterations[0].elapsed_ms / 1000
    lanes = {}
    for stage, spans in enumerate(found.spans):
        training = Span(Doing.TRAINING, began, spans[0].start)
        again = Span(Doing.TRAINING, spans[-1].end, log.iterations[-1].time)
        title = f'stage {stage}\nnode-{stage} {"lost" if stage == found.lost else "lives on"}'
        lanes[title] = [training, *spans, again]
    what = f'stage {found.lost} lost with its node'
    return Failure(what, killed_at, before[-1], found.new, lanes)


# ---- both runs


@dataclass(frozen=True)
class Result:
    """Results of both runs."""

    digests: tuple[str, str]
    """Digests of the final state of the fault-free and of the recovered run."""
    bit_identical: bool
    losses: tuple[tuple[float, float], tuple[float, float]]
    """Losses of the first iteration in both runs, and those of the last."""
    iteration_ms: tuple[float, float]
    """Medians without and with sparse checkpointing, over the same undisturbed iterations."""
    recovery: LocalizedRecovery
    captured: dict[int, CapturedBytes]

    @property
    def overhead(self) -> float:
        """Median iteration time with sparse checkpointing, divided by that without."""
        return self.iteration_ms[1] / self.iteration_ms[0]

    @property
    def slot_over_dense(self) -> float:
        """Bytes of the mean slot divided by those of a dense checkpoint, over all ranks."""
        slots = sum(statistics.mean(rank.slots) for rank in self.captured.values())
        return slots / sum(rank.dense for rank in self.captured.values())

    def line(self) -> str:
        starting, replaying = self.recovery.spans[self.recovery.lost]
        return (
            f'demo: bit_identical={str(self.bit_identical).lower()} '
            f'replayed={self.recovery.replayed[self.recovery.lost]} '
            f'recovery_s={self.recovery.seconds:.1f} '
            f'(starting processes {starting.end - starting.start:.1f}, '
            f'replaying {replaying.end - replaying.start:.1f}) '
            f'overhead={self.overhead:.3f} slot_over_dense={self.slot_over_dense:.3f}'
        )


def result(
    plain: Trained, disturbed: Trained, captured: dict[int, CapturedBytes], lost: int
) -> Result:
    """Compare two runs.

    Raises:
        LabError: a stage other than the lost one rolled back.
    """
    ends = [(run.log.iterations[0].loss, run.log.iterations[-1].loss) for run in (plain, disturbed)]
    assert disturbed.hurt_at is not None
    before = [item for item in disturbed.log.iterations if item.time <= disturbed.hurt_at]
    undisturbed = {item.number for item in before[WARM_UP_ITERATIONS:]}
    return Result(
        digests=(plain.state.digest, disturbed.state.digest),
        bit_identical=not disturbed.different(plain),
        losses=((ends[0][0], ends[1][0]), (ends[0][1], ends[1][1])),
        iteration_ms=(
            _median_ms(plain.log.iterations, undisturbed), _median_ms(before, undisturbed)
        ),
        recovery=localized_recovery(disturbed, lost),
        captured=captured,
    )  # fmt: skip


def _median_ms(iterations: Sequence[Iteration], numbers: set[int]) -> float:
    return statistics.median(item.elapsed_ms for item in iterations if item.number in numbers)


def print_summary(result: Result, console: Console) -> None:
    recovery, (plain_ms, sparse_ms) = result.recovery, result.iteration_ms
    replayed = ', '.join(
        f'{count} (stage {stage})' for stage, count in enumerate(recovery.replayed)
    )
    slot = result.slot_over_dense
    dense = sum(rank.dense for rank in result.captured.values())
    verdict = '[bold green]equal[/]' if result.bit_identical else '[bold red]DIFFERENT[/]'
    first, second = (digest[:12] for digest in result.digests)
    losses = zip(('first loss', 'final loss'), result.losses, strict=True)
    rows = [
        *((name, f'{plain:.4f}', f'{sparse:.4f}') for name, (plain, sparse) in losses),
        ('digest of the final state', first, f'{second}  {verdict}'),
        ('iterations replayed', '-', replayed),
        ('seconds, kill to new iteration', '-', f'{recovery.seconds:.1f}'),
        ('median iteration (ms)', f'{plain_ms:.0f}',
         f'{sparse_ms:.0f}  ({result.overhead - 1:+.1%})'),
        ('bytes a checkpoint (all ranks)', f'{dense / MIB:.2f} MiB dense',
         f'{slot * dense / MIB:.2f} MiB a slot  ({slot:.0%})'),
    ]  # fmt: skip
    title = 'Fault-free run against the run that lost a node'
    both = tables.table(('', '>fault-free', '>recovered'), rows, title=title, title_justify='left')
    for shown in ('', both, '', _stage_table(recovery)):
        console.print(shown)


def _stage_table(recovery: LocalizedRecovery) -> Table:
    table = Table(title='Recovery by pipeline stage', title_justify='left')
    table.add_column('')
    for stage in range(len(recovery.replayed)):
        fate = 'lost' if stage == recovery.lost else 'kept its state'
        table.add_column(f'stage {stage} ({fate})', justify='right')
    table.add_row('iterations replayed', *map(str, recovery.replayed))
    table.add_section()
    for name in PHASES:
        seconds = [f'{phases[name]:.2f}' for phases in recovery.phases]
        table.add_row(f'{name.replace("_", " ")} (s)', *seconds)
    return table
