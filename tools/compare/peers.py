# SPDX-License-Identifier: Apache-2.0
"""Compares this project with other projects, unmodified, that protect the same trainer.

    scripts/peers.sh && moevement compare peers
    moevement compare peers --rows plain,localized-spare,nvrx-in-job --json peers.json

A small GPT trains on 2 ranks; every row protects every iteration, without limits on copies. In each
round every row runs once: the tool measures iterations and CPU time, samples memory, then kills one
rank (SIGKILL) and measures the seconds until the end of the first new iteration. The report shows
the load of the machine, which affects all figures.

Rows with two pipeline stages are compared with plain Megatron on two stages. lm-resiliency 0.2.0
restores different iterations on different stages, so it runs with data parallelism, and has its own
plain run.

Exit status: 0 done, 1 a row of this project ended with other bits, 2 no result.
"""

import argparse
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from ..bench.comeback import PHASES, comeback, kept
from ..bench.frame import Bench, Figure, Report
from ..lab import presets, trainer
from ..lab.cpu_clock import Spent, file_bytes, memory_bytes, spent
from ..lab.job import Job, Trained, memory_directory, train
from ..lab.launch import ROOT, Launch, Launcher
from ..lab.run_log import RunLog
from ..lab.torchrun import Agents
from . import running
from .rows import named, read_rows

RANKS = 2
SITE = ROOT / '.peers'
"""Where `scripts/peers.sh` installs."""
PLAIN, PLAIN_DATA = 'plain', 'plain-data'
_FIRST, _KILL_AFTER, _ITERATIONS, _VICTIM = 4, 12, 40, 1


class Elastic(Agents):
    """torchrun with the c10d rendezvous: the static rendezvous keeps dead addresses in its store.

    All nodes share one agent.
    """

    def _rendezvous(self, node: int, port: int) -> dict[str, object]:
        return {
            'nnodes': 1,
            'rdzv_backend': 'c10d',
            'rdzv_endpoint': f'127.0.0.1:{port}',
            'rdzv_id': 'compare',
            'monitor_interval': 0.1,
        }


class InJob(Elastic):
    """It restarts workers within the job."""

    MODULE = 'nvidia_resiliency_ext.fault_tolerance.launcher'

    def _rendezvous(self, node: int, port: int) -> dict[str, object]:
        return super()._rendezvous(node, port) | {'ft_ignore_missing_cfg': True}


ELASTIC, IN_JOB = 'elastic', 'in-job'
_LAUNCHERS: dict[str, Launcher | Callable[[Launch], Agents]] = {
    'local': Launcher.LOCAL,
    'torchrun': Launcher.TORCHRUN,
    ELASTIC: Elastic,
    IN_JOB: InJob,
}


class PeerRow(msgspec.Struct, frozen=True):
    """A way to protect the trainer.

    In texts `{folder}` is that of the job, and `{memory}` a directory in a tmpfs.
    """

    title: str
    flags: str = ''
    variables: dict[str, str] = {}
    launcher: str = ELASTIC
    nodes: int = 1
    spares: int = 0
    replicas_of_data: bool = False
    """Runs with data parallelism, as it cannot run with pipeline stages."""
    ours: bool = False

    @property
    def theirs(self) -> bool:
        """True if it needs what `scripts/peers.sh` installs."""
        return self.launcher == IN_JOB or bool(self.variables)

    def launch(self, folder: Path, memory: Path, flags: Sequence[str]) -> Launch:
        filled_in = {'folder': folder, 'memory': memory}
        variables = {name: text.format(**filled_in) for name, text in self.variables.items()}
        if self.launcher == ELASTIC:
            # Otherwise the store of torchrun's c10d rendezvous keeps addresses of dead workers.
            variables['TORCH_DISABLE_SHARE_RDZV_TCP_STORE'] = '1'
        if not self.ours:
            modules = (str(ROOT), str(SITE), os.environ.get('PYTHONPATH'))
            variables['PYTHONPATH'] = os.pathsep.join(filter(None, modules))
        own = [one.format(**filled_in) for one in self.flags.split()]
        return Launch(
            folder,
            [*flags, *own],
            nodes=self.nodes,
            workers_per_node=RANKS // self.nodes,
            max_restarts=10,
            spares=self.spares,
            variables=variables,
            program_file=trainer.__file__,
        )


class _Peers(msgspec.Struct):
    """Contents of peers.toml."""

    rows: dict[str, PeerRow]
    cannot: dict[str, tuple[str, str]]
    """For each project that cannot run here, the reason, and the command that shows it."""


PEERS, CANNOT = msgspec.structs.astuple(read_rows('peers.toml', _Peers))


class PeerRun(msgspec.Struct, frozen=True):
    """One row in one round."""

    ratio: float
    """Seconds of an iteration over those of plain Megatron."""
    cpu: float
    """CPU seconds of all processes, launchers and spares too, over those of plain Megatron."""
    cpu_training: float
    """The same ratio, for the training threads alone."""
    tmpfs_mb: float
    """Most pages of files in the tmpfs at any time, without logs of what stages send."""
    logs_mb: float
    memory_mb: float
    """Anonymous memory of all processes beyond that of plain Megatron."""
    up_s: float
    """Seconds from the command to the first iteration."""
    up_cpu_s: float
    """CPU seconds of all processes until then."""
    back_s: float | None
    """Seconds from SIGKILL to the first new iteration; None: not killed."""
    start_s: float | None
    """Part of `back_s`, until the last new process ran the program."""
    again: int | None
    """Iterations that were logged again."""
    different: list[str]
    """Kinds of state that differ from plain Megatron at the end."""
    load: float

    @property
    def bits(self) -> str:
        return f'differ: {", ".join(self.different)}' if self.different else 'equal'


class Watched:
    """A job, with samples taken while it trained."""

    def __init__(self) -> None:
        self.samples: list[Spent] = []
        """At iterations 1, `_FIRST` and `_KILL_AFTER`."""
        self.began = time.time()
        self.memory = self.tmpfs = self.logs = 0
        self.killed: float | None = None
        self.load = os.getloadavg()[0]

    def watch(self, job: Job, memory: Path, kill: bool) -> float:
        """Sample the job, and kill a rank; returns the time."""
        for number in (1, _FIRST, _KILL_AFTER):
            job.await_iteration(number, partial(self._sample, memory))
            self.samples.append(spent(job.launchers(), [pid for pid in job.pids() if pid]))
        self.memory = memory_bytes(job.launchers())
        self.killed = job.send([_VICTIM], signal.SIGKILL) if kill else None
        return self.killed or self.samples[-1].time

    def _sample(self, memory: Path) -> None:
        self.logs, self.tmpfs = map(max, file_bytes(memory), (self.logs, self.tmpfs))


def compared(
    ran: Watched, trained: Trained, beside: Watched, plain: Trained, started: Sequence[float]
) -> PeerRun:
    """Figures of a job, relative to plain Megatron in the same round.

    Raises LabError: no new iteration came after the kill.
    """
    mine, other = (one.samples[2] - one.samples[1] for one in (ran, beside))
    log = trained.log
    back = None if ran.killed is None else comeback(log, trained.events, started, ran.killed)
    return PeerRun(
        ratio=_pace_s(log) / _pace_s(plain.log),
        cpu=mine.total_s / other.total_s,
        cpu_training=mine.training_s / other.training_s,
        tmpfs_mb=ran.tmpfs / 1e6,
        logs_mb=ran.logs / 1e6,
        memory_mb=(ran.memory - beside.memory) / 1e6,
        up_s=log.iterations[0].time - ran.began,
        up_cpu_s=ran.samples[0].total_s,
        back_s=back.seconds if back else None,
        start_s=back.phases[PHASES[0]] if back else None,
        again=len(log.iterations) - len(kept(log)) if back else None,
        different=trained.different(plain),
        load=ran.load,
    )


def _pace_s(log: RunLog) -> float:
    """Median seconds of the iterations before the kill."""
    return statistics.median(RunLog(log.attempts[:1], []).wall_seconds(_FIRST, _KILL_AFTER))


class PeersBench(Bench):
    """Rows on the same model and text; plain Megatron before the rows beside it."""

    PROG, OUTPUT = 'moevement compare peers', 'runs/compare'
    WORDS = {'rows': ','.join(PEERS)}
    FIGURES = {
        'ratio': Figure('iteration'),
        'cpu': Figure('CPU'),
        'cpu_training': Figure('training thread'),
        'tmpfs_mb': Figure('tmpfs MB', '.1f'),
        'logs_mb': Figure('logs MB', '.1f'),
        'memory_mb': Figure('memory MB', '.0f'),
        'up_s': Figure('up s', '.1f'),
        'up_cpu_s': Figure('up CPU s', '.1f'),
        'back_s': Figure('back s', '.1f'),
        'start_s': Figure('start', '.1f'),
        'again': Figure('again', '.1f', ranged=False),
        'bits': Figure('bits'),
        'load': Figure('load', '.0f'),
    }

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        try:
            names = set(named(args.rows or ','.join(PEERS), PEERS))
        except ValueError as error:
            parser.error(str(error))
        names |= {PLAIN_DATA if PEERS[name].replicas_of_data else PLAIN for name in names}
        args.rows = [name for name in PEERS if name in names]
        theirs = [PEERS[name].title for name in args.rows if PEERS[name].theirs]
        if theirs and not SITE.is_dir():
            parser.error(f'{theirs[0]} is not installed: scripts/peers.sh')

    def __init__(self, args: argparse.Namespace, output: Path, data: Path) -> None:
        super().__init__(args, output, data)
        self._plain: dict[bool, tuple[Watched, Trained]] = {}

    def titles(self) -> Mapping[str, str]:
        return {name: PEERS[name].title for name in self.args.rows}

    def may_fail(self, way: str) -> bool:
        return way not in (PLAIN, PLAIN_DATA)

    def line(self, one: PeerRun) -> str:
        return f'{one.ratio:.2f}' + ('' if one.back_s is None else f', back in {one.back_s:.1f} s')

    def run(self, way: str, number: int) -> PeerRun:
        row, folder, ran = PEERS[way], self.output / f'{number}-{way}', Watched()
        stages = 1 if row.replicas_of_data else RANKS
        flags = presets.training_flags(self.data, _ITERATIONS)
        flags += ['--pipeline-model-parallel-size', str(stages)]
        flags += ['--expert-model-parallel-size', '1']
        kill = self.may_fail(way)
        with memory_directory('moevement-peers-') as memory:
            launch = row.launch(folder, memory, flags)
            launcher = _LAUNCHERS[row.launcher]
            trained = train(launch, lambda job: ran.watch(job, memory, kill), launcher)
        shutil.rmtree(folder / 'checkpoints', ignore_errors=True)
        if not kill:
            self._plain[row.replicas_of_data] = ran, trained
        return compared(ran, trained, *self._plain[row.replicas_of_data], running.starts(folder))

    def different(self, rounds: Sequence[Mapping[str, PeerRun]]) -> list[str]:
        runs = (run for one in rounds for run in one.items())
        return sorted({way for way, run in runs if PEERS[way].ours and run.different})

    def notes(self, report: Report) -> Iterator[str]:
        yield f'{RANKS} ranks, {len(report.rounds)} rounds; iteration and CPU: over plain Megatron.'
        for name, (why, shown) in CANNOT.items():
            yield f'{name}: {why}\n    {shown}'


main = PeersBench.main
