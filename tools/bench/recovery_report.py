# SPDX-License-Identifier: Apache-2.0
"""Results of `bench.recovery`: phases of a recovery, ratios over the rounds, a table."""

import statistics
from collections.abc import Sequence

import msgspec
from rich.console import Console

from moevement_ext.events import Event, NextTier, Recovered, WorkerStarted

from ..lab.errors import LabError
from ..lab.evidence import kind_of
from ..lab.figures import Spread, medians
from ..lab.hardware import Hardware
from ..lab.run_log import RunLog
from ..lab.tables import say, table

STAGES = 4
VICTIM = 2
"""A rank whose stage has neighbours on both sides."""
WORKER, ALL = 'worker', 'all'
SPARE, COLD, WHOLE, DISK = 'localized-spare', 'localized', 'whole-job', 'torch-dist'
ELASTIC = 'whole-job-elastic'
TITLES = {
    SPARE: 'localized, hot spare',
    COLD: 'localized',
    WHOLE: 'whole job, host memory',
    DISK: 'whole job, torch_dist',
    ELASTIC: 'whole job, --sparse-ckpt-elastic, same layout',
}
USUAL = tuple(name for name in TITLES if name != ELASTIC)


class Comeback(msgspec.Struct, frozen=True):
    """The recovery of one job that lost workers."""

    seconds: float
    """Seconds from the kill to the first new iteration."""
    phases: dict[str, float]
    """Seconds by phase, in order; their sum is `seconds`."""
    stage_iterations: int
    """Number of repeated iterations, times the number of stages that repeated them."""
    different: list[str]
    """Kinds of state that differ from the undisturbed run."""


class MethodResult(msgspec.Struct, frozen=True):
    """One way to recover, over all rounds."""

    title: str
    seconds: Spread
    ratio: Spread
    """Seconds divided by those of the first way in the same round."""
    phases: dict[str, float]
    """Median seconds by phase; 0 in a round without it."""
    stage_iterations: float
    different: list[str]


class RecoveryReport(msgspec.Struct, frozen=True):
    """Results of all ways to recover."""

    hardware: Hardware
    lose: str
    """The killed workers: one worker, or all."""
    stages: int
    window: int
    kill_after: int
    dense_interval: int
    methods: dict[str, MethodResult]
    rounds: list[dict[str, Comeback]]

    @property
    def exact(self) -> bool:
        """True if sparse checkpointing always led to the bits of an undisturbed run."""
        return not any(one.different for name, one in self.methods.items() if name != DISK)


# ---- phases


def sparse_recovery(
    log: RunLog, killed_at: float, events: Sequence[Event], different: list[str]
) -> Comeback:
    """Phases in the events of the slowest of the ranks that repeated most iterations.

    Args:
        log: log of the last rank, over all its processes.
        killed_at: time of the signal (seconds since the epoch).
        events: those of all ranks, in the order of time.
        different: kinds of state that differ from the undisturbed run.
    """
    after = [event for event in events if event.time > killed_at]
    for event in kind_of(after, NextTier):
        raise LabError(f'host memory was not used: {event.reason}')
    back = {event.rank: event for event in kind_of(after, Recovered)}
    if missing := sorted(set(range(STAGES)) - set(back)):
        raise LabError(f'ranks {missing} did not report a recovery')
    slowest = max(back.values(), key=lambda event: (event.replayed, event.time))
    started = [event for event in kind_of(after, WorkerStarted) if event.rank == slowest.rank]
    before = [item.number for item in log.attempts[0] if item.time <= killed_at]
    committed = slowest.target if slowest.localized else before[-1]
    assert isinstance(committed, int)  # a localized recovery always sets it
    new = log.first_after(committed)
    last = max(event.time for event in back.values())
    phases = {
        'process start': started[-1].time - killed_at,
        **{name.replace('_', ' '): value for name, value in slowest.seconds.items() if value},
        'all else': last - started[-1].time - sum(slowest.seconds.values()),
        'new iteration': new.time - last,
    }
    again = sum(event.replayed for event in back.values())
    return Comeback(new.time - killed_at, phases, again, different)


def dense_restart(log: RunLog, killed_at: float, different: list[str]) -> Comeback:
    """Phases in the log: restart with load, repeated iterations, first new iteration."""
    first, died_after = log.attempts[1][0], log.attempts[0][-1].number
    new = log.first_after(died_after)
    training_at = first.time - first.elapsed_ms / 1000
    again = [item.time for item in log.attempts[1] if item.number <= died_after]
    caught_up_at = max(again, default=training_at)
    phases = {
        'process start, load': training_at - killed_at,
        'recompute': caught_up_at - training_at,
        'new iteration': new.time - caught_up_at,
    }
    recomputed = STAGES * (died_after - first.number + 1)
    return Comeback(new.time - killed_at, phases, recomputed, different)


# ---- over the rounds


def over_rounds(rounds: Sequence[dict[str, Comeback]]) -> dict[str, MethodResult]:
    """Each way to recover; ratios are taken within a round."""
    return {name: _method(name, rounds) for name in rounds[0]}


def _method(name: str, rounds: Sequence[dict[str, Comeback]]) -> MethodResult:
    runs, first = [runs[name] for runs in rounds], next(iter(rounds[0]))
    return MethodResult(
        title=TITLES[name],
        seconds=Spread.of([run.seconds for run in runs]),
        ratio=Spread.of([runs[name].seconds / runs[first].seconds for runs in rounds]),
        phases=medians([run.phases for run in runs]),
        stage_iterations=statistics.median(run.stage_iterations for run in runs),
        different=sorted({kind for run in runs for kind in run.different}),
    )


def print_report(report: RecoveryReport, console: Console) -> None:
    say(console, report.hardware.line())
    columns = ('', '>seconds to a new iteration', '>ratio', '>stage-iterations again')
    rows = (
        (one.title, one.seconds.text(), one.ratio.text(), f'{one.stage_iterations:.0f}')
        for one in report.methods.values()
    )
    console.print(table(columns, rows))
    for method in report.methods.values():
        phases = ', '.join(f'{name} {value:.2f}' for name, value in method.phases.items())
        say(console, f'{method.title}: {phases} s')
    victim = f'rank {VICTIM}' if report.lose == WORKER else 'all'
    say(
        console,
        f'{report.stages} stages on {report.stages} emulated nodes, {len(report.rounds)} rounds; '
        f'{victim} killed after iteration {report.kill_after}; window {report.window}, '
        f'torch_dist every {report.dense_interval} iterations.',
    )
    for method in report.methods.values():
        verdict = f'differs in: {", ".join(method.different)}' if method.different else 'equal'
        what = f'Final state against that of an undisturbed run, {method.title}'
        say(console, f'{what}: {verdict}.')
