# SPDX-License-Identifier: Apache-2.0
"""Trains twice, once undisturbed, once with the loss of a node; both end in the same bits.

    scripts/demo.sh

The job: an 8-expert GPT on 2 emulated nodes of 2 workers each, one pipeline stage per node, on real
text, on the CPU or on one GPU. In the second run the demo kills the workers of the first node and
deletes its memory. Hot spares take over and replay the lost stage alone; the workers of the other
node keep running and keep their state. Exit status 0 only if all of this happened and the final
states of both runs are equal, bit for bit.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moevement_ext.events import WindowPersisted
from moevement_ext.memory.node_store import NodeStore
from tools.chaos import demo_summary
from tools.chaos.demo_summary import Result, captured_bytes
from tools.lab.arguments import Parser
from tools.lab.benchmark import exit_on_sigterm, print_failure
from tools.lab.digests import difference_table, differences
from tools.lab.errors import LabError
from tools.lab.evidence import ranks_with
from tools.lab.four_ranks import NODES, STAGE_RANKS, WORKERS_PER_NODE, WORLD_SIZE, training_flags
from tools.lab.job import Job, memory_directory
from tools.lab.launch import Launch, add_share_gpu, node_name
from tools.lab.models import native_precision, prepare_text, sparse_flags
from tools.lab.plots import plot
from tools.lab.run_log import RunLog
from tools.lab.trained import Trained, train

RUN_ID = 'demo'
LOST = 0
"""The node, and the pipeline stage, that the second run loses. The last rank writes the log."""
_DATA_MB = 8
_MAX_RESTARTS = 3
_PLAIN, _DISTURBED = 'fault-free', 'recovered'


class _NodeLoss:
    """Kills one node's workers and deletes its memory once the job is far enough."""

    def __init__(self, kill_after: int, memory: Path, console: Console) -> None:
        self._kill_after = kill_after
        self._memory = memory
        self._console = console
        self.killed_at: float | None = None
        self.captured: dict[int, demo_summary.CapturedBytes] = {}

    def __call__(self, job: Job, log: RunLog) -> str:
        """Act on the running job if it is time; called repeatedly. Returns the job's activity."""
        if self.killed_at is None:
            if log.iterations[-1].number >= self._kill_after:
                self._lose(job, log)
            return 'training'
        back = demo_summary.all_recovered(job.events())
        return 'training' if back else f'stage {LOST} recovers, stage {1 - LOST} waits'

    def _lose(self, job: Job, log: RunLog) -> None:
        if ranks_with(job.events(), WindowPersisted) != set(range(WORLD_SIZE)):
            return
        self.killed_at, nbytes = job.lose_node(STAGE_RANKS[LOST][0])
        # All that is left: the other node's own windows and its replicas.
        self.captured = captured_bytes(NodeStore(self._memory, RUN_ID, node_name(1 - LOST)))
        self._console.print(
            f'  [red]node-{LOST} is lost[/] after iteration {log.iterations[-1].number}: killed '
            f'its {WORKERS_PER_NODE} workers (all of pipeline stage {LOST}) and deleted its memory '
            f'({nbytes / 2**20:.0f} MiB).\n'
            '  Hot spares, processes that have imported the program, take over, and fetch the '
            f'replicas that node-{1 - LOST} holds.\n'
            f'  The workers of node-{1 - LOST} (stage {1 - LOST}) keep their state '
            'and wait.',
            highlight=False,
            soft_wrap=True,
        )


def run_demo(args: argparse.Namespace, console: Console) -> Result:
    """Run the demo and print the summary.

    Raises:
        LabError: a run failed, or a stage other than the lost one rolled back.
    """
    output = args.output.resolve()
    for stale in (_PLAIN, _DISTURBED):
        shutil.rmtree(output / stale, ignore_errors=True)
    console.print('[bold]1. Text:[/] the sources of the standard library as byte tokens')
    data = prepare_text(output / 'data', _DATA_MB, quiet=False)
    flags = training_flags(data, args.iterations, native_precision(args.share_gpu))

    def launch(name: str, more: Sequence[str] = (), max_restarts: int = 0) -> Launch:
        spares = WORKERS_PER_NODE if max_restarts else 0
        return Launch(
            output / name, [*flags, *more], NODES, WORKERS_PER_NODE, max_restarts, spares,
            share_gpu=args.share_gpu,
        )  # fmt: skip

    console.print('[bold]2. Fault-free run:[/] plain Megatron, without --sparse-ckpt')
    plain = train(launch(_PLAIN), lambda job: _follow(job, args, console, lambda *_: 'training'))
    console.print(
        f'[bold]3. The same with --sparse-ckpt[/], which loses node-{LOST}', highlight=False
    )
    with memory_directory('moevement-demo-') as memory:
        loss = _NodeLoss(args.kill_after, memory, console)

        def hurt(job: Job) -> float | None:
            _follow(job, args, console, loss)
            return loss.killed_at

        more = sparse_flags(memory, RUN_ID, args.window, output / _DISTURBED / 'events')
        disturbed = train(launch(_DISTURBED, more, _MAX_RESTARTS), hurt, memory=memory / RUN_ID)
    if disturbed.hurt_at is None:
        raise LabError(
            f'the run ended before a window was persisted on all {WORLD_SIZE} ranks, so nothing '
            f'was lost; see {output / _DISTURBED}'
        )
    return _compare(output, plain, disturbed, loss, console)


def _follow(
    job: Job, args: argparse.Namespace, console: Console, look: Callable[[Job, RunLog], str]
) -> None:
    """Show progress until the job is over; `look`, called often, returns the job's activity."""
    columns = (
        TextColumn('  {task.description}'),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn('iterations'),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task('starting processes', total=args.iterations)
        for log in job.follow('the end'):
            if log.iterations:
                doing, newest = look(job, log), log.iterations[-1]
                status = f'{doing}, loss {newest.loss:.3f}'
                progress.update(task, completed=newest.number, description=status)


def _compare(
    output: Path, plain: Trained, disturbed: Trained, loss: _NodeLoss, console: Console
) -> Result:
    found = differences(plain.state, disturbed.state)
    if found:
        console.print(difference_table(found, plain.state, disturbed.state))
    result = demo_summary.result(plain, disturbed, loss.captured, LOST)
    picture = output / 'demo.png'
    dense = loss.captured[WORLD_SIZE - 1].dense
    plot(plain.log, disturbed.log, dense, picture, demo_summary.story(disturbed, result.recovery))
    demo_summary.print_summary(result, console)
    console.print(f'Plot: {picture}', highlight=False, soft_wrap=True)
    return result


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog='scripts/demo.sh', description=__doc__)
    add = parser.add_argument
    add('--iterations', type=int, default=40, help='to train (default: 40)')
    add(
        '--kill-after',
        type=int,
        default=28,
        help='iteration after which the node is lost (default: 28)',
    )
    add('--window', type=int, default=6, help='iterations a window (default: 6)')
    add('--output', type=Path, default=Path('runs/demo'), help='folder for data, logs and the plot')
    add_share_gpu(parser)
    args = parser.parse_args(argv)
    parser.require_at_least_1(args, 'window')
    if args.kill_after < 2 * args.window:
        parser.error(
            f'--kill-after {args.kill_after}: must be at least twice --window {args.window}, so '
            'that a window is complete by then'
        )
    if args.iterations <= args.kill_after + 1:
        parser.error(
            f'--iterations {args.iterations}: must be above --kill-after {args.kill_after} + 1'
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    console = Console()
    exit_on_sigterm()
    try:
        result = run_demo(args, console)
    except LabError as error:
        print_failure(console, 'demo', error)
        return 2
    except KeyboardInterrupt:
        console.print('demo: interrupted; its processes are stopped and its memory is freed')
        return 130
    print(result.line(), flush=True)
    return 0 if result.bit_identical else 1


if __name__ == '__main__':
    sys.exit(main())
