# SPDX-License-Identifier: Apache-2.0
"""The demo step by step: data, fault-free run, run that loses a node, comparison."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moevement_ext.memory.node_store import NodeStore
from tools.compare_digests import DigestFileError, difference_table, differences, read_digest
from tools.demo import evidence, localized
from tools.demo.evidence import CapturedBytes
from tools.demo.failure import DemoError
from tools.demo.flags import STAGE_RANKS, sparse_flags, training_flags
from tools.demo.job import NODES, ROOT, WORLD_SIZE, Job
from tools.demo.summary import Result, print_summary
from tools.plot_run import LogError, RunLog, plot, read_log

RUN_ID = 'demo'
LOST = 0
"""The node and the pipeline stage that the second run loses. The last rank writes the log."""
TITLES = [
    f'stage {stage}\n{node} {"lost" if stage == LOST else "lives on"}'
    for stage, node in enumerate(NODES)
]
DATA_MB = 8
_MEMORY = Path('/dev/shm')
_STALLED_SECONDS = 300
_POLL_SECONDS = 0.1


class Strike:
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
            self._strike_when_due(job, log)
            return 'training'
        if not self._recovered:
            self._look_for_recovery()
        return 'training' if self._recovered else f'stage {LOST} comes back, stage {1 - LOST} waits'

    def _strike_when_due(self, job: Job, log: RunLog) -> None:
        if log.iterations[-1].number < self._kill_after:
            return
        persisted = evidence.ranks_with(evidence.read_events(self._events), 'window_persisted')
        if persisted != set(range(WORLD_SIZE)):
            return
        self.killed_at = time.time()
        killed = job.kill_workers(LOST)
        lost = self._memory / RUN_ID / NODES[LOST]
        nbytes = sum(path.stat().st_size for path in lost.rglob('*') if path.is_file())
        shutil.rmtree(lost)
        # What is left must do for all: the other node's own windows and its replicas.
        self.captured = evidence.captured_bytes(NodeStore(self._memory, RUN_ID, NODES[1 - LOST]))
        self._say(
            f'  [red]{NODES[LOST]} is lost[/] after iteration {log.iterations[-1].number}: killed '
            f'its {killed} workers (all of pipeline stage {LOST}) and deleted its memory '
            f'({nbytes / 2**20:.0f} MiB).\n'
            f'  Its torchrun agent starts new workers, which fetch the replicas that '
            f'{NODES[1 - LOST]} holds.\n'
            f'  The workers of {NODES[1 - LOST]} (stage {1 - LOST}) live on: they keep their state '
            'and wait.'
        )

    def _look_for_recovery(self) -> None:
        events = evidence.read_events(self._events)
        if not localized.all_recovered(events, range(WORLD_SIZE)):
            return
        self._recovered = True
        replayed = [
            max(e['replayed'] for e in events if e['event'] == 'recovered' and e['rank'] in ranks)
            for ranks in STAGE_RANKS
        ]
        self._say(
            f'  [green]Stage {LOST} is back:[/] it replayed {replayed[LOST]} iterations from '
            f'replicas and logged boundary tensors; stage {1 - LOST} replayed '
            f'{replayed[1 - LOST]}. Training goes on.'
        )

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def run_demo(
    output: Path, iterations: int, kill_after: int, window: int, console: Console
) -> Result:
    """Do everything and print the summary.

    Args:
        output: folder for data, logs, digests and the plot.
        iterations: to train in each run.
        kill_after: iteration after which the second run loses a node.
        window: iterations per window.
        console: for people.

    Raises:
        DemoError: a run failed, or more than the lost stage went back.
    """
    output = output.resolve()
    data = _prepare_data(output / 'data' / 'stdlib', console)
    for stale in ('fault-free', 'recovered', 'events'):
        shutil.rmtree(output / stale, ignore_errors=True)
    with _memory_directory() as directory:
        memory = Path(directory)
        plain = _fault_free_run(output, data, iterations, console)
        sparse, strike = _struck_run(output, data, iterations, kill_after, window, memory, console)
    return _compare(output, plain, sparse, strike, console)


def _prepare_data(prefix: Path, console: Console) -> Path:
    if not prefix.with_suffix('.idx').exists():
        console.print('[bold]1. Text:[/] the sources of the standard library as byte tokens')
        command = [sys.executable, str(ROOT / 'tools' / 'prepare_data.py')]
        command += ['--output-prefix', str(prefix), '--limit-mb', str(DATA_MB)]
        if subprocess.run(
            command, cwd=ROOT, env=os.environ | {'PYTHONWARNINGS': 'ignore'}
        ).returncode:
            raise DemoError('the text could not be prepared (see above)')
    else:
        console.print(f'[bold]1. Text:[/] {prefix}.bin is there already')
    return prefix


def _fault_free_run(output: Path, data: Path, iterations: int, console: Console) -> RunLog:
    console.print('[bold]2. Fault-free run:[/] plain Megatron, without --sparse-ckpt')
    flags = training_flags(data, iterations, output / 'fault-free.json')
    with Job(output / 'fault-free', flags, max_restarts=0) as job:
        _follow(job, iterations, console, lambda job, log: 'training')
        return _read_log(job)


def _struck_run(
    output: Path,
    data: Path,
    iterations: int,
    kill_after: int,
    window: int,
    memory: Path,
    console: Console,
) -> tuple[RunLog, Strike]:
    console.print(
        f'[bold]3. The same with --sparse-ckpt[/], to lose {NODES[LOST]} on the way',
        highlight=False,
    )
    events = output / 'events'
    flags = [
        *training_flags(data, iterations, output / 'recovered.json'),
        *sparse_flags(memory, RUN_ID, events, window),
    ]
    strike = Strike(kill_after, events, memory, console)
    with Job(output / 'recovered', flags, max_restarts=3) as job:
        _follow(job, iterations, console, strike)
        log = _read_log(job)
    if strike.killed_at is None:
        raise DemoError(
            f'the run ended before a window was persisted on all {WORLD_SIZE} ranks, so nothing '
            f'was lost; see {job.log}'
        )
    return log, strike


def _follow(
    job: Job, iterations: int, console: Console, look: Callable[[Job, RunLog], str]
) -> None:
    """Show progress until the job is over; `look` sees it again and again and says what it does."""
    columns = (
        TextColumn('  {task.description}'), BarColumn(), MofNCompleteColumn(),
        TextColumn('iterations'), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task('starting processes', total=iterations)
        lines, changed = -1, time.monotonic()
        while job.running():
            time.sleep(_POLL_SECONDS)
            log = job.read_log()
            if len(log.iterations) != lines:
                lines, changed = len(log.iterations), time.monotonic()
            elif time.monotonic() - changed > _STALLED_SECONDS:
                raise DemoError(f'no iteration in {_STALLED_SECONDS} s', job.tail())
            if log.iterations:
                doing, newest = look(job, log), log.iterations[-1]
                status = f'{doing}, loss {newest.loss:.3f}'
                progress.update(task, completed=newest.number, description=status)


def _read_log(job: Job) -> RunLog:
    try:
        return read_log(job.log)
    except LogError as error:
        raise DemoError(str(error)) from error


def _compare(
    output: Path, plain: RunLog, sparse: RunLog, strike: Strike, console: Console
) -> Result:
    assert strike.killed_at is not None
    try:
        first = read_digest(output / 'fault-free.json')
        second = read_digest(output / 'recovered.json')
    except DigestFileError as error:
        raise DemoError(str(error)) from error
    found = differences(first, second)
    if found:
        console.print(difference_table(found, first, second))
    events = evidence.read_events(output / 'events')
    recovery = localized.recovery(events, sparse, strike.killed_at, STAGE_RANKS, LOST)
    result = Result(
        bit_identical=not found,
        plain=plain,
        sparse=sparse,
        killed_at=strike.killed_at,
        recovery=recovery,
        captured=strike.captured,
    )
    picture = output / 'demo.png'
    story = localized.story(events, sparse, recovery, strike.killed_at, STAGE_RANKS, TITLES)
    plot(plain, sparse, strike.captured[WORLD_SIZE - 1].dense, picture, story)
    print_summary(result, (first.digest, second.digest), console)
    console.print(f'Plot: {picture}', highlight=False, soft_wrap=True)
    return result


def _memory_directory() -> tempfile.TemporaryDirectory[str]:
    if not _MEMORY.is_dir():
        raise DemoError(f'{_MEMORY} is missing; the demo keeps its windows in this tmpfs of Linux')
    return tempfile.TemporaryDirectory(
        prefix='moevement-demo-', dir=_MEMORY, ignore_cleanup_errors=True
    )
