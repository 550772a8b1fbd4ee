# SPDX-License-Identifier: Apache-2.0
"""What `bench.localized` finds: phases of a recovery, ratios over the rounds, a table."""

import statistics
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from moevement_ext.events import Event, FailureDetected, Recovered, RecoveryStarted
from tools.lab.errors import LabError
from tools.lab.evidence import kind_of
from tools.lab.figures import Spread
from tools.lab.hardware import Hardware
from tools.lab.run_log import RunLog

STAGES = 4
VICTIM = 2
"""A stage with neighbours on both sides."""
PLAIN, WINDOWS, LOGS, DENSE = 'plain', 'windows', 'windows-and-logs', 'torch-dist'
SPARE, COLD, WHOLE, DISK = 'localized-spare', 'localized', 'whole-job', 'torch-dist'
TITLES = {
    SPARE: 'localized, hot spare',
    COLD: 'localized',
    WHOLE: 'whole job, host memory',
    DISK: 'whole job, torch_dist',
}
MICRO_BATCHES = 4


class Cost(msgspec.Struct, frozen=True):
    """An undisturbed run of one way to protect it, warm-up dropped."""

    iteration_s: float
    """Median."""
    stage_cpu_s: float
    """CPU seconds of the process of the stage that is killed elsewhere, per iteration."""
    exposed_ms: float
    """Mean exposed time of an iteration, from the log of sparse checkpointing on the last rank."""
    save_ms: float
    """That a torch_dist checkpoint stops training for; median."""
    host_bytes: int
    """Host memory of all ranks."""
    log_bytes: int
    """Logged in an iteration, by all ranks."""
    digest: str


class Comeback(msgspec.Struct, frozen=True):
    """One job that lost a worker and came back."""

    seconds: float
    """From the kill to the first new iteration."""
    phases: dict[str, float]
    """Seconds, in order; they add up to `seconds`."""
    stage_iterations: int
    """Iterations computed a second time, times the stages that did."""
    replay_s: float
    """Seconds for which a localized recovery converts and catches up."""
    different: list[str]
    """Kinds of state that do not equal those of the undisturbed run."""


class MethodResult(msgspec.Struct, frozen=True):
    """One way to recover, over all rounds."""

    title: str
    seconds: Spread
    ratio: Spread
    """Seconds over those of localized recovery with a hot spare in the same round."""
    phases: dict[str, float]
    """Medians."""
    stage_iterations: float
    different: list[str]


class LocalizedReport(msgspec.Struct, frozen=True):
    """Everything that was found."""

    hardware: Hardware
    stages: int
    window: int
    kill_after: int
    dense_interval: int
    equal_overhead_interval: float
    """Without the limit of --longest-interval."""
    iteration_ms: dict[str, Spread]
    overhead: dict[str, Spread]
    """Iteration time over that of plain Megatron in the same round."""
    log_overhead: Spread
    """Iteration time with windows and logs over that with windows alone."""
    log_bytes: int
    host_bytes: dict[str, int]
    replay_s: Spread
    replay_bound_s: Spread
    replay_over_bound: Spread
    methods: dict[str, MethodResult]
    costs: list[dict[str, Cost]]
    rounds: list[dict[str, Comeback]]

    @property
    def exact(self) -> bool:
        """Sparse checkpointing always led to the bits of an undisturbed run."""
        return not any(self.methods[name].different for name in (SPARE, COLD, WHOLE))


def localized_recovery(
    log: RunLog,
    killed_at: float,
    died_at: float,
    events: Sequence[Event],
    different: list[str],
) -> Comeback:
    """Phases as the replaced worker went through them.

    Args:
        log: of the last rank.
        killed_at: when the signal was sent (seconds since the epoch).
        died_at: when the launcher saw the worker dead; Linux frees its memory before.
        events: of all ranks, in the order of time.
        different: kinds of state that do not equal those of the undisturbed run.

    Raises:
        LabError: there was no new iteration.
    """
    after = [event for event in events if event.time > killed_at]
    detected = kind_of(after, FailureDetected)
    back = {event.rank: event for event in kind_of(after, Recovered)}
    victim = back[VICTIM]
    (started,) = (event for event in kind_of(after, RecoveryStarted) if event.rank == VICTIM)
    assert isinstance(victim.target, int)  # of a localized recovery it is always set
    new = log.first_after(victim.target)
    if new is None:
        raise LabError(f'the job never got beyond iteration {victim.target}')
    own, noticed = victim.seconds, max(event.time for event in detected)
    unblock = max(event.seconds['unblock'] for rank, event in back.items() if rank != VICTIM)
    steps = {name: own[name] for name in ('regroup', 'fetch', 'convert', 'catch_up')}
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
    return Comeback(
        seconds=new.time - killed_at,
        phases=phases,
        stage_iterations=victim.replayed,
        replay_s=own['convert'] + own['catch_up'],
        different=different,
    )


def equal_interval(costs: Sequence[dict[str, Cost]]) -> float:
    """Iterations between torch_dist checkpoints that cost as much as windows and logs do.

    Their cost is the difference to plain Megatron or, where noise hides that, the time that sparse
    checkpointing itself counts as taken from training.
    """
    stall = statistics.median(run[DENSE].save_ms / 1000 for run in costs)
    sparse = statistics.median(run[LOGS].iteration_s - run[PLAIN].iteration_s for run in costs)
    exposed = statistics.median(run[LOGS].exposed_ms / 1000 for run in costs)
    return max(1.0, stall / max(sparse, exposed))


def summarize(
    hardware: Hardware,
    window: int,
    kill_at: int,
    interval: int,
    costs: list[dict[str, Cost]],
    rounds: list[dict[str, Comeback]],
) -> LocalizedReport:
    """Ratios within each round, then over the rounds."""
    names = (PLAIN, WINDOWS, LOGS, DENSE)
    per_micro_batch = statistics.median(run[PLAIN].stage_cpu_s for run in costs) / MICRO_BATCHES
    replays = [runs[name] for runs in rounds for name in (SPARE, COLD)]
    bounds = [run.stage_iterations * MICRO_BATCHES * per_micro_batch for run in replays]
    return LocalizedReport(
        hardware=hardware,
        stages=STAGES,
        window=window,
        kill_after=kill_at,
        dense_interval=interval,
        equal_overhead_interval=equal_interval(costs),
        iteration_ms={
            name: Spread.of([1000 * run[name].iteration_s for run in costs]) for name in names
        },
        overhead={
            name: Spread.of([run[name].iteration_s / run[PLAIN].iteration_s for run in costs])
            for name in names
        },
        log_overhead=Spread.of([run[LOGS].iteration_s / run[WINDOWS].iteration_s for run in costs]),
        log_bytes=costs[-1][LOGS].log_bytes,
        host_bytes={name: costs[-1][name].host_bytes for name in (WINDOWS, LOGS)},
        replay_s=Spread.of([run.replay_s for run in replays]),
        replay_bound_s=Spread.of(bounds),
        replay_over_bound=Spread.of(
            [run.replay_s / bound for run, bound in zip(replays, bounds, strict=True)]
        ),
        methods={name: _method(name, rounds) for name in TITLES},
        costs=costs,
        rounds=rounds,
    )


def _method(name: str, rounds: Sequence[dict[str, Comeback]]) -> MethodResult:
    runs = [runs[name] for runs in rounds]
    return MethodResult(
        title=TITLES[name],
        seconds=Spread.of([run.seconds for run in runs]),
        ratio=Spread.of([runs[name].seconds / runs[SPARE].seconds for runs in rounds]),
        phases={
            phase: statistics.median(run.phases[phase] for run in runs) for phase in runs[0].phases
        },
        stage_iterations=statistics.median(run.stage_iterations for run in runs),
        different=sorted({kind for run in runs for kind in run.different}),
    )


def print_report(report: LocalizedReport, console: Console) -> None:
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
    say(
        f'{report.stages} stages on {report.stages} emulated nodes, {len(report.rounds)} rounds; '
        f'rank {VICTIM} killed after iteration {report.kill_after}; window {report.window}, '
        f'torch_dist every {report.dense_interval} iterations '
        f'(equal overhead: every {report.equal_overhead_interval:.0f}).\n'
        f'Replay {report.replay_s.text()} s, lower bound {report.replay_bound_s.text()} s: '
        f'{report.replay_over_bound.text()} times.'
    )
    for name, spread in report.iteration_ms.items():
        ratio = report.overhead[name].text(3)
        say(f'{name:17} {spread.text(0)} ms an iteration, {ratio} times plain Megatron')
    say(
        f'Logs: {report.log_overhead.text(3)} times the iteration time without; '
        f'{report.log_bytes} bytes an iteration; host memory {report.host_bytes[LOGS]} bytes, '
        f'{report.host_bytes[WINDOWS]} without (all ranks).'
    )
    for method in report.methods.values():
        verdict = f'differs in: {", ".join(method.different)}' if method.different else 'equal'
        say(f'Final state against that of an undisturbed run, {method.title}: {verdict}.')
