# SPDX-License-Identifier: Apache-2.0
"""Strikes a training job at random and checks that it ends as if nothing had happened.

    python -m tools.chaos --faults 20 --seed 1

A small GPT trains on real text under the launcher that replaces single workers. Workers are killed
or stopped, nodes lose their memory, at random moments, also while the job recovers. The final state
of every job is compared, bit for bit, with that of plain Megatron to which nothing happened. The
same seed draws the same faults; how far into an iteration they strike, the machine decides.

A fault has one of three outcomes: `localized` (the other workers kept their state), `whole_job`
(all workers were started again and recovered from host memory), `disk` (from a dense checkpoint, or
from the start). An iteration is lost if the last rank had logged it before the recovery and the job
trains it again after it; what is replayed as part of the recovery is not lost. Iterations that were
cut off before they were committed are not lost either: nobody had them.

Exit status: 0 nothing was lost and all states are equal, 1 that is not so, 2 a job failed.
"""

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from moevement_ext.config import ConfigurationError
from tools.bench.jobs import exit_on_sigterm, memory_directory, print_failure
from tools.bench.model import prepare_data
from tools.chaos.evidence import Tier
from tools.chaos.flags import Layout, parse_layout, sparse_flags, training_flags
from tools.chaos.job import Job
from tools.chaos.plan import Fault, Kind, draw_faults, draw_window
from tools.chaos.striking import FEWEST_ITERATIONS, LAST_ITERATIONS, Outcome, Striker
from tools.compare_digests import (
    DigestFileError,
    StateDigest,
    difference_table,
    differences,
    read_digest,
)
from tools.demo.failure import DemoError

RANDOM = 'random'
_LONGEST_WINDOW = 6
_ITERATIONS_PER_FAULT = 2 * FEWEST_ITERATIONS
_ENVIRONMENT = {
    'OMP_NUM_THREADS': '1',  # keeps the order of summation, hence the bits
    'CUDA_VISIBLE_DEVICES': '',
    'GLOO_SOCKET_IFNAME': 'lo',
    'PYTHONWARNINGS': 'ignore',
}


class Chaos(NamedTuple):
    """What is to be run."""

    output: Path
    data: Path
    layout: Layout
    nodes: int
    workers_per_node: int
    spares: int
    window: int | None
    """W of all jobs; None: drawn for each."""
    seed: int
    faults_per_job: int
    console: Console

    @property
    def iterations(self) -> int:
        """That each job trains: enough for all its faults."""
        first_window = 2 * (self.window or _LONGEST_WINDOW)
        return first_window + self.faults_per_job * _ITERATIONS_PER_FAULT + LAST_ITERATIONS

    def undisturbed(self) -> StateDigest:
        """Run plain Megatron to its end; returns its final state."""
        folder = self.output / 'undisturbed'
        digest = folder / 'digest.json'
        flags = training_flags(self.layout, self.data, self.iterations, digest)
        with Job(folder, flags, self.nodes, self.workers_per_node, max_restarts=0) as job:
            for _ in job.follow('the end'):
                pass
        return read_digest(digest)

    def strike(self, number: int, faults: Sequence[Fault]) -> tuple[list[Outcome], StateDigest]:
        """Strike one job; returns what became of the faults it had time for, and its final state.

        Raises:
            DemoError: the job failed or stands still.
        """
        window = self.window or draw_window(self.seed, number, _LONGEST_WINDOW)
        self._print(f'job {number}: {self.layout.name}, window {window}')
        folder = self.output / f'job{number}'
        digest = folder / 'digest.json'
        outcomes: list[Outcome] = []
        began = time.time()

        def report(outcome: Outcome) -> None:
            outcomes.append(outcome)
            self._print(f'{time.time() - began:6.1f} s  {outcome.line()}')

        with memory_directory() as memory:
            flags = training_flags(self.layout, self.data, self.iterations, digest)
            flags += sparse_flags(memory, window, folder / 'events')
            nodes = self.nodes, self.workers_per_node
            with Job(folder, flags, *nodes, spares=self.spares, memory=memory) as job:
                Striker(job, self.iterations, report).strike_all(faults)
        return outcomes, read_digest(digest)

    def run(self, faults: Sequence[Fault]) -> tuple[list[Outcome], bool]:
        """Strike as many jobs as it takes; returns all outcomes and if all final states are equal.

        Raises:
            DemoError: a job failed, or had no time for any fault.
        """
        reference = self.undisturbed()
        outcomes: list[Outcome] = []
        identical, number = True, 0
        while len(outcomes) < len(faults):
            number += 1
            due = faults[len(outcomes) : len(outcomes) + self.faults_per_job]
            found, digest = self.strike(number, due)
            if not found:
                raise DemoError(f'job {number} was over before the first fault')
            outcomes += found
            different = differences(reference, digest)
            if different:
                identical = False
                self.console.print(difference_table(different, reference, digest))
            self._print(f'job {number}: final state {"DIFFERENT" if different else "equal"}')
        return outcomes, identical

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def summary(outcomes: Sequence[Outcome], identical: bool) -> str:
    """The last line, for programs."""
    tiers = [outcome.recovery.tier for outcome in outcomes]
    counts = ' '.join(f'{tier}={tiers.count(tier)}' for tier in Tier)
    lost = sum(outcome.lost for outcome in outcomes)
    return (
        f'chaos: faults={len(outcomes)} {counts} lost_iterations={lost} '
        f'bit_identical={str(identical).lower()}'
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked; exits with a message if they are wrong."""
    parser = argparse.ArgumentParser(
        prog='chaos', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add('--faults', type=int, default=20, help='how many (default: 20)')
    add('--seed', type=int, help='of the faults and windows (default: the time)')
    add('--nodes', type=int, default=4, help='emulated nodes (default: 4)')
    add('--workers-per-node', type=int, help='default: what the layout needs')
    add('--spares', type=int, default=1, help='hot spares (default: 1)')
    add('--window', default=RANDOM, help='iterations per window, or random for each job (default)')
    add('--layout', default='pp2-ep2', help='pp2-ep2 (default), pp4, pp2-dp2, pp2-vp2, pp2-tp2 ...')
    add('--kinds', default=','.join(Kind), help=f'default: {",".join(Kind)}')
    add('--faults-per-job', type=int, default=10, help='at most (default: 10)')
    add('--output', type=Path, default=Path('runs/chaos'), help='folder for data and logs')
    args = parser.parse_args(argv)
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def check(args: argparse.Namespace) -> None:
    """Turn texts into what they mean, in place.

    Raises:
        ValueError: which flag breaks which rule.
    """
    for name in ('faults', 'nodes', 'faults_per_job'):
        if getattr(args, name) < 1:
            raise ValueError(f'--{name.replace("_", "-")} must be at least 1')
    try:
        args.layout = parse_layout(args.layout)
    except ValueError as error:
        raise ValueError(f'--layout {error}') from error
    if args.workers_per_node is None:
        args.workers_per_node = max(1, args.layout.ranks // args.nodes)
    if args.nodes * args.workers_per_node != args.layout.ranks:
        raise ValueError(
            f'--layout {args.layout.name} has {args.layout.ranks} ranks; --nodes {args.nodes} '
            f'--workers-per-node {args.workers_per_node} is another number'
        )
    if args.window != RANDOM and not (args.window.isdecimal() and int(args.window) > 0):
        raise ValueError(f'--window {args.window} must be a whole number above 0, or {RANDOM}')
    names = [name for name in args.kinds.split(',') if name]
    if not names or not set(names) <= set(Kind):
        raise ValueError(f'--kinds {args.kinds} must be some of {",".join(Kind)}')
    args.kinds = [Kind(name) for name in names]
    if Kind.NODE in args.kinds and args.nodes == 1:
        raise ValueError('--kinds node needs --nodes 2 or more: no replica survives the only node')
    if Kind.DOUBLE in args.kinds and args.layout.ranks == 1:
        raise ValueError('--kinds double needs two ranks')


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    os.environ.update(_ENVIRONMENT)
    os.environ.pop('MOEVEMENT_FAIL_AT', None)
    console = Console()
    seed = time.time_ns() if args.seed is None else args.seed
    output = args.output.resolve()
    for stale in ('undisturbed', *(path.name for path in output.glob('job*'))):
        shutil.rmtree(output / stale, ignore_errors=True)
    faults = draw_faults(seed, args.faults, args.kinds, args.nodes, args.workers_per_node)
    console.print(f'chaos: seed {seed}', highlight=False)
    try:
        chaos = Chaos(
            output=output,
            data=prepare_data(output / 'data'),
            layout=args.layout,
            nodes=args.nodes,
            workers_per_node=args.workers_per_node,
            spares=args.spares,
            window=None if args.window == RANDOM else int(args.window),
            seed=seed,
            faults_per_job=min(args.faults, args.faults_per_job),
            console=console,
        )
        outcomes, identical = chaos.run(faults)
    except DemoError as error:
        print_failure(console, f'chaos: seed {seed}', error)
        return 2
    except (ConfigurationError, DigestFileError) as error:
        console.print(f'chaos: {error}', style='bold red', markup=False)
        return 2
    line = summary(outcomes, identical)
    print(line, flush=True)
    return 0 if identical and not any(outcome.lost for outcome in outcomes) else 1


if __name__ == '__main__':
    exit_on_sigterm()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
