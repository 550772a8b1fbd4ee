# SPDX-License-Identifier: Apache-2.0
"""What `bench.recovery` finds: phases of a recovery, ratios over the rounds, a table."""

import statistics
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from moevement_ext.events import (
    Event,
    FailureDetected,
    NextTier,
    Recovered,
    RecoveryStarted,
    WorkerStarted,
)
from tools.lab.errors import LabError
from tools.lab.evidence import kind_of, ranks_with
from tools.lab.figures import Spread
from tools.lab.hardware import Hardware
from tools.lab.run_log import Iteration, RunLog
from tools.lab.trained import Trained

STAGES = 4
VICTIM = 2
"""A stage with neighbours on both sides."""
WORKER, ALL = 'worker', 'all'
SPARE, COLD, WHOLE, DISK = 'localized-spare', 'localized', 'whole-job', 'torch-dist'
TITLES = {
    SPARE: 'localized, hot spare',
    COLD: 'localized',
    WHOLE: 'whole job, host memory',
    DISK: 'whole job, torch_dist',
}


class Comeback(msgspec.Struct, frozen=True):
    """One job that lost workers and came back."""

    seconds: float
    """From the kill to the first new iteration."""
    phases: dict[str, float]
    """Seconds, in order; they add up to `seconds`."""
    stage_iterations: int
    """Iterations computed a second time, times the stages that did."""
    different: list[str]
    """Kinds of state that do not equal those of the undisturbed run."""


class MethodResult(msgspec.Struct, frozen=True):
    """One way to recover, over all rounds."""

    title: str
    seconds: Spread
    ratio: Spread
    """Seconds over those of the first way in the same round."""
    phases: dict[str, float]
    """Medians."""
    stage_iterations: float
    different: list[str]


class RecoveryReport(msgspec.Struct, frozen=True):
    """Everything that was found."""

    hardware: Hardware
    lose: str
    """Who was killed: a worker, or all."""
    stages: int
    window: int
    kill_after: int
    dense_interval: int
    methods: dict[str, MethodResult]
    rounds: list[dict[str, Comeback]]

    @property
    def exact(self) -> bool:
        """Sparse checkpointing always led to the bits of an undisturbed run."""
        return not any(one.different for name, one in self.methods.items() if name != DISK)


# ---- phases


def localized_recovery(found: Trained, died_at: float, different: list[str]) -> Comeback:
    """Phases as the replaced worker went through them.

    Args:
        found: the job.
        died_at: when the launcher saw the worker dead (seconds since the epoch); Linux frees its
            memory before.
        different: kinds of state that do not equal those of the undisturbed run.

    Raises:
        LabError: there was no new iteration.
    """
    killed_at = found.hurt_at
    assert killed_at is not None
    after = [event for event in found.events if event.time > killed_at]
    back = {event.rank: event for event in kind_of(after, Recovered)}
    victim = back[VICTIM]
    (started,) = (event for event in kind_of(after, RecoveryStarted) if event.rank == VICTIM)
    assert isinstance(victim.target, int)  # of a localized recovery it is always set
    new = first_new_iteration(found.log, victim.target)
    noticed = max(event.time for event in kind_of(after, FailureDetected))
    unblock = max(event.seconds['unblock'] for rank, event in back.items() if rank != VICTIM)
    steps = {name: victim.seconds[name] for name in ('regroup', 'fetch', 'convert', 'catch_up')}
    last = max(event.time for event in back.values())
    phases = {
        'die': died_at - killed_at,
        'detect': noticed - died_at - unblock,
        'unblock': unblock,
        'respawn': started.time - noticed,
        **{name.replace('_', ' '): value for name, value in steps.items()},
        'resume': last - started.time - sum(steps.values()),
        'new iteration': new.time - last,
    }
    return Comeback(new.time - killed_at, phases, victim.replayed, different)


def first_new_iteration(log: RunLog, before: int) -> Iteration:
    """The first iteration beyond one that was committed before.

    Raises:
        LabError: there is none.
    """
    new = log.first_after(before)
    if new is None:
        raise LabError(f'the job never got beyond iteration {before}')
    return new


def dense_restart(log: RunLog, killed_at: float, different: list[str]) -> Comeback:
    """Phases out of the log: the restart with the load, recomputation, the first new iteration."""
    first, died_after = log.lives[1][0], log.lives[0][-1].number
    new = first_new_iteration(log, died_after)
    training_at = first.time - first.elapsed_ms / 1000
    again = [item.time for item in log.lives[1] if item.number <= died_after]
    caught_up_at = max(again, default=training_at)
    phases = {
        'process start, load': training_at - killed_at,
        'recompute': caught_up_at - training_at,
        'new iteration': new.time - caught_up_at,
    }
    recomputed = STAGES * (died_after - first.number + 1)
    return Comeback(new.time - killed_at, phases, recomputed, different)


def sparse_restart(
    log: RunLog, killed_at: float, events: Sequence[Event], different: list[str]
) -> Comeback:
    """Phases out of the events of the slowest rank.

    Raises:
        LabError: a rank did not recover from host memory.
    """
    for event in kind_of(events, NextTier):
        raise LabError(f'host memory was not used: {event.reason}')
    missing = set(range(STAGES)) - ranks_with(events, Recovered)
    if missing:
        raise LabError(f'ranks {sorted(missing)} did not report a recovery')
    slowest = kind_of(events, Recovered)[-1]
    started_at = max(event.time for event in kind_of(events, WorkerStarted))
    new = first_new_iteration(log, log.lives[0][-1].number)
    steps = slowest.seconds
    phases = {
        'process start': started_at - killed_at,
        'set-up': slowest.time - started_at - sum(steps.values()),
        **{name.replace('_', ' '): value for name, value in steps.items()},
        'new iteration': new.time - slowest.time,
    }
    return Comeback(new.time - killed_at, phases, STAGES * slowest.replayed, different)


# ---- over the rounds


def summarize(
    hardware: Hardware, window: int, what: tuple[str, int, int], rounds: list[dict[str, Comeback]]
) -> RecoveryReport:
    """Ratios within each round, then over the rounds.

    Args:
        hardware: of this machine.
        window: W.
        what: who was killed, after which iteration, and the interval of torch_dist checkpoints.
        rounds: of each way to recover.
    """
    methods = {name: _method(name, rounds) for name in rounds[0]}
    return RecoveryReport(hardware, what[0], STAGES, window, *what[1:], methods, rounds)


def _method(name: str, rounds: Sequence[dict[str, Comeback]]) -> MethodResult:
    runs, first = [runs[name] for runs in rounds], next(iter(rounds[0]))
    return MethodResult(
        title=TITLES[name],
        seconds=Spread.of([run.seconds for run in runs]),
        ratio=Spread.of([runs[name].seconds / runs[first].seconds for runs in rounds]),
        phases={
            phase: statistics.median(run.phases[phase] for run in runs) for phase in runs[0].phases
        },
        stage_iterations=statistics.median(run.stage_iterations for run in runs),
        different=sorted({kind for run in runs for kind in run.different}),
    )


def print_report(report: RecoveryReport, console: Console) -> None:
    """For people."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    say(report.hardware.line())
    table = Table()
    for column in ('', 'seconds to a new iteration', 'ratio', 'stage-iterations again'):
        table.add_column(column, justify='right' if column else 'left')
    for method in report.methods.values():
        again = f'{method.stage_iterations:.0f}'
        table.add_row(method.title, method.seconds.text(), method.ratio.text(), again)
    console.print(table)
    for method in report.methods.values():
        phases = ', '.join(f'{name} {value:.2f}' for name, value in method.phases.items())
        say(f'{method.title}: {phases} s')
    who = f'rank {VICTIM}' if report.lose == WORKER else 'all'
    say(
        f'{report.stages} stages on {report.stages} emulated nodes, {len(report.rounds)} rounds; '
        f'{who} killed after iteration {report.kill_after}; window {report.window}, '
        f'torch_dist every {report.dense_interval} iterations.'
    )
    for method in report.methods.values():
        verdict = f'differs in: {", ".join(method.different)}' if method.different else 'equal'
        say(f'Final state against that of an undisturbed run, {method.title}: {verdict}.')
