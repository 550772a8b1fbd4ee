# SPDX-License-Identifier: Apache-2.0
"""The demo step by step: data, fault-free run, run that loses a node, comparison."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moevement_ext.events import Recovered, WindowPersisted
from moevement_ext.memory.node_store import NodeStore
from tools.demo import costs, localized
from tools.demo.costs import CapturedBytes
from tools.demo.model import (
    NODES,
    STAGE_RANKS,
    WORKERS_PER_NODE,
    WORLD_SIZE,
    training_flags,
)
from tools.demo.summary import Result, print_summary
from tools.lab.digests import difference_table, differences, read_digest
from tools.lab.errors import LabError
from tools.lab.evidence import kind_of, ranks_with, read_events
from tools.lab.job import Job, memory_directory
from tools.lab.launch import Launch, node_name
from tools.lab.models import prepare_text, sparse_flags
from tools.lab.plots import plot
from tools.lab.run_log import RunLog, read_log

RUN_ID = 'demo'
LOST = 0
"""The node and the pipeline stage that the second run loses. The last rank writes the log."""
NODE_TITLES = [f'node-{node}' for node in range(NODES)]
STAGE_TITLES = [
    f'stage {stage}\n{node} {"lost" if stage == LOST else "lives on"}'
    for stage, node in enumerate(NODE_TITLES)
]
DATA_MB = 8
_MAX_RESTARTS = 3
_POLL_SECONDS = 0.1


class Plan(NamedTuple):
    """What both runs do."""

    output: Path
    """Folder for data, logs, digests and the plot."""
    iterations: int
    """To train in each run."""
    kill_after: int
    """Iteration after which the second run loses a node."""
    window: int
    """Iterations per window."""
    share_gpu: bool = False
    """All ranks on the first GPU, rather than on the CPU."""

    def launch(self, folder: str, flags: list[str], max_restarts: int = 0) -> Launch:
        """One of the runs; logs go to a folder of that name in `output`."""
        return Launch(
            self.output / folder,
            flags,
            NODES,
            WORKERS_PER_NODE,
            max_restarts,
            share_gpu=self.share_gpu,
            spares=WORKERS_PER_NODE if max_restarts else 0,
        )


class NodeLoss:
    """Kills one node's workers and deletes its memory once the job is far enough."""

    def __init__(self, kill_after: int, events: Path, memory: Path, console: Console) -> None:
        self._kill_after = kill_after
        self._events = events
        self._memory = memory
        self._console = console
        self.killed_at: float | None = None
        self.captured: dict[int, CapturedBytes] = {}
        self._recovered = False

    def __call__(self, job: Job, log: RunLog) -> str:
        """Look at the job, which runs; called again and again. Returns what the job does now."""
        if self.killed_at is None:
            self._lose_when_due(job, log)
            return 'training'
        if not self._recovered:
            self._look_for_recovery()
        return 'training' if self._recovered else f'stage {LOST} comes back, stage {1 - LOST} waits'

    def _lose_when_due(self, job: Job, log: RunLog) -> None:
        if log.iterations[-1].number < self._kill_after:
            return
        persisted = ranks_with(read_events(self._events), WindowPersisted)
        if persisted != set(range(WORLD_SIZE)):
            return
        memory = self._memory / RUN_ID
        self.killed_at, nbytes = job.lose_node(STAGE_RANKS[LOST][0], memory)
        # What is left must do for all: the other node's own windows and its replicas.
        self.captured = costs.captured_bytes(NodeStore(self._memory, RUN_ID, node_name(1 - LOST)))
        lost, other = NODE_TITLES[LOST], NODE_TITLES[1 - LOST]
        self._say(
            f'  [red]{lost} is lost[/] after iteration {log.iterations[-1].number}: killed '
            f'its {WORKERS_PER_NODE} workers (all of pipeline stage {LOST}) and deleted its memory '
            f'({nbytes / 2**20:.0f} MiB).\n'
            f'  Hot spares, processes that have imported the program, take over, and fetch the '
            f'replicas that {other} holds.\n'
            f'  The workers of {other} (stage {1 - LOST}) live on: they keep their state '
            'and wait.'
        )

    def _look_for_recovery(self) -> None:
        events = read_events(self._events)
        if not localized.all_recovered(events, range(WORLD_SIZE)):
            return
        self._recovered = True
        replayed = [
            max(event.replayed for event in kind_of(events, Recovered) if event.rank in ranks)
            for ranks in STAGE_RANKS
        ]
        self._say(
            f'  [green]Stage {LOST} is back:[/] it replayed {replayed[LOST]} iterations from '
            f'replicas and logged boundary tensors; stage {1 - LOST} replayed '
            f'{replayed[1 - LOST]}. Training goes on.'
        )

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def run_demo(plan: Plan, console: Console) -> Result:
    """Do everything and print the summary.

    Args:
        plan: what both runs do.
        console: for people.

    Raises:
        LabError: a run failed, or more than the lost stage went back.
    """
    plan = plan._replace(output=plan.output.resolve())
    data = _prepare_data(plan.output / 'data', console)
    for stale in ('fault-free', 'recovered', 'events'):
        shutil.rmtree(plan.output / stale, ignore_errors=True)
    plain = _fault_free_run(plan, data, console)
    with memory_directory('moevement-demo-') as memory:
        sparse, loss = _disturbed_run(plan, data, memory, console)
    return _compare(plan.output, plain, sparse, loss, console)


def _prepare_data(folder: Path, console: Console) -> Path:
    prefix = folder / 'stdlib'
    if not prefix.with_suffix('.idx').exists():
        console.print('[bold]1. Text:[/] the sources of the standard library as byte tokens')
    else:
        console.print(f'[bold]1. Text:[/] {prefix}.bin is there already')
    return prepare_text(folder, DATA_MB, quiet=False)


def _fault_free_run(plan: Plan, data: Path, console: Console) -> RunLog:
    console.print('[bold]2. Fault-free run:[/] plain Megatron, without --sparse-ckpt')
    flags = training_flags(data, plan.iterations, plan.output / 'fault-free.json')
    with Job(plan.launch('fault-free', flags)) as job:
        _follow(job, plan.iterations, console, lambda job, log: 'training')
        return read_log(job.log)


def _disturbed_run(
    plan: Plan, data: Path, memory: Path, console: Console
) -> tuple[RunLog, NodeLoss]:
    console.print(
        f'[bold]3. The same with --sparse-ckpt[/], to lose {NODE_TITLES[LOST]} on the way',
        highlight=False,
    )
    events = plan.output / 'events'
    flags = [
        *training_flags(data, plan.iterations, plan.output / 'recovered.json'),
        *sparse_flags(memory, RUN_ID, plan.window, events),
    ]
    loss = NodeLoss(plan.kill_after, events, memory, console)
    with Job(plan.launch('recovered', flags, _MAX_RESTARTS)) as job:
        _follow(job, plan.iterations, console, loss)
        log = read_log(job.log)
    if loss.killed_at is None:
        raise LabError(
            f'the run ended before a window was persisted on all {WORLD_SIZE} ranks, so nothing '
            f'was lost; see {job.log}'
        )
    return log, loss


def _follow(
    job: Job, iterations: int, console: Console, look: Callable[[Job, RunLog], str]
) -> None:
    """Show progress until the job is over; `look` sees it again and again and says what it does."""
    columns = (
        TextColumn('  {task.description}'),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn('iterations'),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task('starting processes', total=iterations)
        for log in job.follow('the end', _POLL_SECONDS):
            if log.iterations:
                doing, newest = look(job, log), log.iterations[-1]
                status = f'{doing}, loss {newest.loss:.3f}'
                progress.update(task, completed=newest.number, description=status)


def _compare(
    output: Path, plain: RunLog, sparse: RunLog, loss: NodeLoss, console: Console
) -> Result:
    assert loss.killed_at is not None
    first = read_digest(output / 'fault-free.json')
    second = read_digest(output / 'recovered.json')
    found = differences(first, second)
    if found:
        console.print(difference_table(found, first, second))
    events = read_events(output / 'events')
    recovery = localized.recovery(events, sparse, loss.killed_at, STAGE_RANKS, LOST)
    result = Result(
        bit_identical=not found,
        plain=plain,
        sparse=sparse,
        killed_at=loss.killed_at,
        recovery=recovery,
        captured=loss.captured,
    )
    picture = output / 'demo.png'
    story = localized.story(events, sparse, recovery, loss.killed_at, STAGE_RANKS, STAGE_TITLES)
    plot(plain, sparse, loss.captured[WORLD_SIZE - 1].dense, picture, story)
    print_summary(result, (first.digest, second.digest), console)
    console.print(f'Plot: {picture}', highlight=False, soft_wrap=True)
    return result
