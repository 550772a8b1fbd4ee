# SPDX-License-Identifier: Apache-2.0
"""Trains twice, once undisturbed, once with the loss of a node; both end in the same bits.

    scripts/demo.sh

The job: an 8-expert GPT on 2 emulated nodes of 2 workers each, one pipeline stage per node, on real
text, on the CPU or on one GPU. In the second run the demo kills the workers of the first node and
deletes its memory. Hot spares take over and replay the lost stage alone; the workers of the other
node keep running and keep their state. Exit status 0 only if all of this happened and the final
states of both runs are equal, bit for bit. OUTPUT/report.html shows what each rank did.
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moevement_ext.events import Recovered, RecoveryStarted

from .lab.digests import compare
from .lab.evidence import kind_of, persisted, problems
from .lab.history import History
from .lab.job import Job, Kind, Trained, memory_directory, train
from .lab.launch import Launch
from .lab.models import native_precision, prepare_text, sparse_flags
from .lab.presets import NODES, STAGE_RANKS, WORKERS_PER_NODE, WORLD_SIZE, training_flags
from .lab.programs import LabError, program, run_tool
from .lab.tables import say
from .report.__main__ import render
from .status import failure_table

RUN_ID = 'demo'
LOST = 0
"""The node, and the pipeline stage, that the second run loses. The last rank writes the log."""
_DATA_MB = 8
_MAX_RESTARTS = 3
_LOAD_MOVES = 2
_PLAIN, _DISTURBED, _PAGE = 'fault-free', 'recovered', 'report.html'
_LOST = f"""\
  [red]node-{LOST} is lost[/] after iteration {{iteration}}: killed its {WORKERS_PER_NODE} workers \
(all of pipeline stage {LOST}) and deleted its memory.
  Hot spares, processes that have imported the program, take over, and fetch the replicas that \
node-{1 - LOST} holds.
  The workers of node-{1 - LOST} (stage {1 - LOST}) keep their state and wait."""


def result(plain: Trained, disturbed: Trained, loads: Sequence[float]) -> tuple[bool, str]:
    """Whether the states are equal, and the last line; `LabError` unless one stage recovered alone.

    In the line: iterations that the lost stage computed again; seconds that the job was away, until
    the lost stage replays, and from then until it has recovered; the overhead, as the page has it,
    unless other work made the `loads` at the end of both runs differ; bytes of the mean slot,
    divided by those of a dense checkpoint, over all ranks.
    """
    history, log = History(disturbed.events), disturbed.log
    wrong = problems(disturbed.events, WORLD_SIZE, 1, [])
    for one in history.episodes:
        if (one.scope, one.stages, one.replaced) != ('localized', [LOST], list(STAGE_RANKS[LOST])):
            wrong.append(f'{one.scope}, stages {one.stages}, new processes of ranks {one.replaced}')
    if len(log.attempts) != 1:
        wrong.append(f'the last rank has had {len(log.attempts)} attempts')
    if wrong:
        why = '; '.join(wrong)
        raise LabError(f'the recovery was not localized: {why}; see the logs and events of the run')
    last, pace = history.episodes[-1], history.pace
    of_lost = [event for rank in STAGE_RANKS[LOST] for event in history.by_rank[rank]]
    replay_at = max(event.time for event in kind_of(of_lost, RecoveryStarted))
    slots = sum(statistics.mean(of_rank) for of_rank in history.slots.values())
    operators = (place.operators for place in history.places.values())
    dense = sum(full for of_rank in operators for full, _ in of_rank.values())
    replaying_s = max(event.time for event in kind_of(of_lost, Recovered)) - replay_at
    identical = not disturbed.different(plain)
    moved = max(loads) > _LOAD_MOVES * max(min(loads), 1.0)
    overhead = 'unknown' if moved or pace is None else f'{pace.overhead:.3f}'
    return identical, (
        f'demo: bit_identical={str(identical).lower()} replayed={last.replayed} '
        f'recovery_s={last.away_s(history.end):.1f} (starting processes '
        f'{replay_at - last.start:.1f}, replaying {replaying_s:.1f}) overhead={overhead} '
        f'slot_over_dense={slots / dense:.3f} load={",".join(f"{one:.1f}" for one in loads)}'
    )


def follow(
    job: Job, iterations: int, console: Console, kill_after: int | None = None
) -> float | None:
    """Show the progress of a job, which may lose a node; returns the time of that, if it did."""
    killed_at = None
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn('iterations'), TimeElapsedColumn())
    with Progress(TextColumn('  {task.description}'), *columns, console=console) as progress:
        task = progress.add_task('starting processes', total=iterations)
        for log in job.follow('the end'):
            if not log.iterations:
                continue
            number, loss = log.iterations[-1].number, log.iterations[-1].loss
            due = kill_after is not None and killed_at is None and number >= kill_after
            if due and persisted(job.events(), job.pids(), 0.0):
                killed_at = job.hurt(Kind.NODE, STAGE_RANKS[LOST])
                console.print(_LOST.format(iteration=number), highlight=False, soft_wrap=True)
            progress.update(task, completed=number, description=f'loss {loss:.3f}')
    return killed_at


def run_demo(args: argparse.Namespace, console: Console) -> int:
    output = args.output.resolve()
    for stale in (_PLAIN, _DISTURBED):
        shutil.rmtree(output / stale, ignore_errors=True)
    console.print('[bold]1. Text:[/] the sources of the standard library as byte tokens')
    data = prepare_text(output / 'data', _DATA_MB, quiet=False)
    flags = training_flags(data, args.iterations, native_precision(args.share_gpu))
    launch = Launch(output / _PLAIN, flags, NODES, WORKERS_PER_NODE, share_gpu=args.share_gpu)
    console.print('[bold]2. Fault-free run:[/] plain Megatron, without --sparse-ckpt')
    plain = train(launch, lambda job: follow(job, args.iterations, console))
    loads = [os.getloadavg()[0]]
    say(console, f'3. The same with --sparse-ckpt, which loses node-{LOST}', style='bold')
    with memory_directory('moevement-demo-') as memory:
        flags += sparse_flags(memory, RUN_ID, args.window, output / _DISTURBED / 'events')
        launch = launch._replace(folder=output / _DISTURBED, flags=flags)
        disturbed = train(
            launch._replace(max_restarts=_MAX_RESTARTS, spares=WORKERS_PER_NODE),
            lambda job: follow(job, args.iterations, console, args.kill_after),
            memory=memory / RUN_ID,
        )
    loads.append(os.getloadavg()[0])
    if disturbed.hurt_at is None:
        raise LabError(
            f'the run ended before a window was persisted on all {WORLD_SIZE} ranks, so nothing '
            f'was lost; see {output / _DISTURBED}'
        )
    compare(console, plain.state, disturbed.state)
    identical, line = result(plain, disturbed, loads)
    history = History(disturbed.events)
    (output / _PAGE).write_text(render(history, 'The demo'), 'utf-8')
    console.print(failure_table(history, time.time()))
    say(console, f'Page: {output / _PAGE}')
    print(line, flush=True)
    return 0 if identical else 1


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = program('demo', __doc__)
    args = parser.parse_args(argv)
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
    try:
        return run_tool('demo', partial(run_demo, args))
    except KeyboardInterrupt:
        print('demo: interrupted; its processes are stopped and its memory is freed')
        return 130


if __name__ == '__main__':
    sys.exit(main())
