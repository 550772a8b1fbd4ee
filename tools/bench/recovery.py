# SPDX-License-Identifier: Apache-2.0
"""Measures recovery after all workers were killed, against Megatron's own checkpoints.

    python -m tools.bench.recovery --json recovery.json

All workers of two jobs are killed after the same iteration, and both jobs are launched again with
the same flags, as a scheduler does: one recovers from windows in host memory, the other loads its
last torch_dist checkpoint and computes again what came after. (Restarts by the agents of torchrun
are no common ground: with static rendezvous plain Megatron trips over the keys that the dead
workers left in the store.) Measured is the time from the kill to the first new iteration. Final
states are compared with that of a run that nothing happened to.

Exit status: 0 done, 1 sparse checkpointing did not lead to the same bits, 2 a run failed or did not
recover.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from tools.bench import model
from tools.bench.model import NODES
from tools.bench.restarts import Restart, dense_restart, sparse_restart
from tools.lab.arguments import Parser
from tools.lab.benchmark import exit_on_sigterm, run_benchmark
from tools.lab.digests import StateDigest, kinds_of_difference, read_digest
from tools.lab.errors import LabError
from tools.lab.evidence import read_events
from tools.lab.figures import Spread
from tools.lab.hardware import Hardware
from tools.lab.job import Job, memory_directory
from tools.lab.launch import Launch, Launcher, add_share_gpu
from tools.lab.models import dense_flags, prepare_text
from tools.lab.run_log import parse_log

_POLL_S = 0.02
_ITERATIONS_AFTER = 3
SPARSE, DENSE = 'sparse', 'torch-dist'
TITLES = {SPARSE: 'sparse checkpointing', DENSE: 'last torch_dist checkpoint'}


class MethodResult(msgspec.Struct, frozen=True):
    """One way to recover, over all rounds."""

    title: str
    seconds: Spread
    phases: dict[str, float]
    """Medians."""
    recomputed: int
    different: list[str]
    """Kinds of state that do not equal those of the undisturbed run, in any round."""


class RecoveryReport(msgspec.Struct, frozen=True):
    """Everything that was found."""

    hardware: Hardware
    ranks: int
    kill_after: int
    dense_interval: int
    window: str
    methods: dict[str, MethodResult]
    ratio: Spread
    """Seconds of the dense recovery over those of the sparse one, per round."""
    rounds: list[dict[str, Restart]]

    @property
    def exact(self) -> bool:
        """Whether sparse checkpointing led to the bits of the undisturbed run."""
        return not self.methods[SPARSE].different


class Bench(NamedTuple):
    """What is to be run."""

    data: Path
    output: Path
    ranks: int
    kill_after: int
    dense_interval: int
    window: str
    share_gpu: bool = False

    def undisturbed(self) -> StateDigest:
        """Final state of plain Megatron when nothing happens to it.

        Raises:
            LabError: it failed.
        """
        folder = self.output / 'undisturbed'
        digest = folder / 'digest.json'
        with self._job(folder, self._training_flags(digest)) as job:
            job.finish()
        return read_digest(digest)

    def run(self, method: str, round_number: int, reference: StateDigest) -> Restart:
        """Run, kill, launch again, and follow to the end.

        Raises:
            LabError: the job failed, or did not recover in the way that is measured.
        """
        folder = self.output / f'{round_number}-{method}'
        digest, events = folder / 'digest.json', folder / 'events'
        with (
            memory_directory() as memory,
            tempfile.TemporaryDirectory(prefix='checkpoints-', dir=self.output) as checkpoints,
        ):
            flags = self._training_flags(digest)
            if method == SPARSE:
                flags += model.sparse_flags(memory, self.window, events)
            else:
                flags += dense_flags(Path(checkpoints), self.dense_interval, asynchronous=False)
            with self._job(folder / 'killed', flags) as job:
                killed_at = kill_after(job, self.kill_after)
            text = job.text()
            with self._job(folder / 'recovered', flags) as job:
                for _ in job.follow('the end', _POLL_S):
                    pass
                text += job.text()
        log = parse_log(text)
        if len(log.lives) != 2:
            raise LabError(f'{method}: killed once, but the logs have {len(log.lives)} lives')
        different = kinds_of_difference(reference, read_digest(digest))
        if method == DENSE:
            return dense_restart(log, killed_at, different)
        return sparse_restart(log, killed_at, read_events(events), self.ranks, different)

    def _training_flags(self, digest: Path) -> list[str]:
        iterations = self.kill_after + _ITERATIONS_AFTER
        return model.training_flags(self.data, self.ranks, iterations, digest)

    def _job(self, folder: Path, flags: Sequence[str]) -> Job:
        launch = Launch(folder, flags, NODES, self.ranks // NODES, share_gpu=self.share_gpu)
        return Job(launch, Launcher.TORCHRUN)


def kill_after(job: Job, iteration: int) -> float:
    """Kill all workers once an iteration is logged; returns when (seconds since the epoch).

    Raises:
        LabError: the job ended before.
    """
    for log in job.follow(f'iteration {iteration}', _POLL_S):
        if log.iterations and log.iterations[-1].number >= iteration:
            return job.send(range(job.world_size), SIGKILL)
    raise LabError(f'the job ended before iteration {iteration}', job.tail())


def summarize(bench: Bench, hardware: Hardware, rounds: list[dict[str, Restart]]) -> RecoveryReport:
    """Medians over the rounds; ratios within each."""
    return RecoveryReport(
        hardware=hardware,
        ranks=bench.ranks,
        kill_after=bench.kill_after,
        dense_interval=bench.dense_interval,
        window=bench.window,
        methods={name: _method(name, [runs[name] for runs in rounds]) for name in TITLES},
        ratio=Spread.of([runs[DENSE].seconds / runs[SPARSE].seconds for runs in rounds]),
        rounds=rounds,
    )


def _method(name: str, runs: Sequence[Restart]) -> MethodResult:
    return MethodResult(
        title=TITLES[name],
        seconds=Spread.of([run.seconds for run in runs]),
        phases={
            phase: statistics.median(run.phases[phase] for run in runs) for phase in runs[0].phases
        },
        recomputed=statistics.median_high(run.recomputed for run in runs),
        different=sorted({kind for run in runs for kind in run.different}),
    )


def print_report(report: RecoveryReport, console: Console) -> None:
    """For people."""
    console.print(report.hardware.line(), highlight=False, soft_wrap=True)
    table = Table()
    for column in ('', 'seconds to a new iteration', 'iterations recomputed'):
        table.add_column(column, justify='right' if column else 'left')
    table.add_column('phases (s)')
    for method in report.methods.values():
        phases = ', '.join(f'{name} {value:.2f}' for name, value in method.phases.items())
        table.add_row(method.title, method.seconds.text(1), str(method.recomputed), phases)
    console.print(table)
    console.print(
        f'{report.ranks} ranks on {NODES} emulated nodes, all killed after iteration '
        f'{report.kill_after}; window {report.window}, torch_dist every {report.dense_interval} '
        f'iterations. torch_dist takes {report.ratio.text()} times as long.',
        highlight=False,
        soft_wrap=True,
    )
    for method in report.methods.values():
        verdict = f'differs in: {", ".join(method.different)}' if method.different else 'equal'
        console.print(
            f'Final state against that of an undisturbed run, {method.title}: {verdict}.',
            highlight=False,
            soft_wrap=True,
        )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked; exits with a message if they are wrong."""
    parser = Parser(
        prog='python -m tools.bench.recovery',
        description=__doc__,
    )
    parser.add_argument('--rounds', type=int, default=2, help='turns of both (default: 2)')
    parser.add_argument('--ranks', type=int, choices=model.RANKS, default=2)
    parser.add_argument(
        '--dense-interval',
        type=int,
        default=10,
        help='iterations between torch_dist checkpoints (default: 10)',
    )
    parser.add_argument(
        '--kill-after',
        type=int,
        help='iteration after which to kill (default: half way between the second checkpoint and '
        'the third)',
    )
    parser.add_argument('--window', default='auto', help='of sparse checkpointing (default: auto)')
    parser.add_argument('--output', type=Path, default=Path('runs/bench'), help='folder for logs')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write everything here')
    add_share_gpu(parser)
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f'--rounds {args.rounds}: must be at least 1')
    if args.dense_interval < 1:
        parser.error(f'--dense-interval {args.dense_interval}: must be at least 1')
    if args.kill_after is None:
        args.kill_after = 2 * args.dense_interval + args.dense_interval // 2
    if args.kill_after <= args.dense_interval:
        parser.error(
            f'--kill-after {args.kill_after}: must be above --dense-interval '
            f'{args.dense_interval}, so that there is a checkpoint to load'
        )
    if args.window != 'auto' and not args.window.isdecimal():
        parser.error(f'--window {args.window}: must be a whole number or auto')
    return args


def measure(args: argparse.Namespace, console: Console) -> RecoveryReport:
    """All rounds.

    Raises:
        LabError: a run failed.
    """
    hardware = Hardware.here(gpu=args.share_gpu)
    output = args.output.resolve() / 'recovery'
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    data = prepare_text(args.output.resolve() / 'data')
    bench = Bench(
        data,
        output,
        args.ranks,
        args.kill_after,
        args.dense_interval,
        args.window,
        args.share_gpu,
    )
    reference = bench.undisturbed()
    rounds: list[dict[str, Restart]] = []
    for number in range(1, args.rounds + 1):
        rounds.append({})
        for name, title in TITLES.items():
            found = bench.run(name, number, reference)
            rounds[-1][name] = found
            console.print(f'round {number}: {found.seconds:5.1f} s  {title}', highlight=False)
    return summarize(bench, hardware, rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    return run_benchmark(
        'bench_recovery',
        lambda console: measure(args, console),
        print_report,
        args.json,
        passed=lambda report: report.exact,
    )


if __name__ == '__main__':
    exit_on_sigterm()
    sys.exit(main())
