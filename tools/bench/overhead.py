# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of protection per iteration, as ratios to plain Megatron on this machine.

    moevement bench overhead --json overhead.json
    git worktree add ../before HEAD~1 && moevement bench overhead --against ../before
    moevement bench overhead --precision all --stand-ins
    moevement bench overhead --precision all --rounds 1 --iterations 300 --stand-ins  # losses

The ways to protect a run take turns over several rounds, so that a slow phase of the machine
affects all of them; ratios are taken within a round. The time of an iteration is the time between
two log lines, so it includes every stall of a save. All runs must end in the same bits. With
`--against` the sparse checkpointing of another checkout of this project also takes turns.

With `--precision` configurations of the paper's Table 7 take turns with bf16 and with bf16 with
another seed, each unprotected and protected. Results: the cost of protection, the bytes of a
window, and the loss. These configurations need Transformer Engine, or stand-ins for it on a CPU.

Exit status: 0 done, 1 the final states differ, 2 a run failed.
"""

import argparse
import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from moevement_ext.events import Event, WindowCommitted, WindowOnDisk

from ..lab import models, precisions, presets
from ..lab.cpu_clock import CpuClock, file_bytes
from ..lab.evidence import kind_of
from ..lab.history import Pace
from ..lab.job import Job, Trained, memory_directory, train
from ..lab.launch import PROGRAM, ROOT, Launch, Launcher, as_flags
from ..lab.models import dense_flags, sparse_flags
from ..lab.presets import NODES
from ..lab.programs import LabError
from ..lab.run_log import RunLog
from .frame import Bench, Figure, Report

PLAIN, SPARSE, AGAINST = 'plain', 'sparse', 'sparse-against'
DISK = 'sparse-disk'
DENSE_IN_MEMORY = 'dense-in-memory'
SYNC, ASYNC = 'torch-dist-sync', 'torch-dist-async'
_POLL_S = 0.25
BF16, ALL, AUTO = 'bf16', 'all', 'auto'
AGAIN = 'bf16, another seed'
FORMATS = (BF16, AGAIN, *(name for name in precisions.FLAGS if name != BF16))
_WINDOW_OF_FORMATS = '4'
# The loss is averaged over the last tenth of the iterations.
_SHARE = 10
_MIB = 1 << 20


class Run(msgspec.Struct, frozen=True):
    """One run of one variant, without its warm-up."""

    iteration_s: float
    """Median seconds of an iteration."""
    all_iterations_s: list[float]
    cpu_s: float
    """CPU seconds of an iteration, per rank, of all processes of the job and its agents."""
    helpers_s: float
    """CPU seconds of Python threads other than the training thread; 0 in plain Megatron."""
    exposed_ms: float | None
    """Mean exposed time of an iteration, as the last rank logs it."""
    windows: str | None
    slots: str | None
    """MiB of each slot in the last window of the last rank."""
    digest: str
    loss: float | None = None
    """Mean over the last tenth of the iterations; None after a NaN."""
    tmpfs_mb: float = 0.0
    """Most pages of files in the tmpfs at any time."""

    @property
    def overhead(self) -> float | None:
        """By the exposed time alone, as the report has it; None: not protected by this project."""
        exposed = self.exposed_ms
        return None if exposed is None else Pace(self.iteration_s, exposed / 1000).overhead


def final_loss(log: RunLog, iterations: int) -> float | None:
    """Mean over the last iterations; None if one of them has no loss in the log, which is a NaN."""
    count = max(iterations // _SHARE, 1)
    last = [item.loss for item in log.iterations if item.number > iterations - count]
    whole = len(last) == count and all(map(math.isfinite, last))
    return statistics.fmean(last) if whole else None


def helpers_s(events: Iterable[Event], warm_up: int) -> float:
    """CPU seconds of helper threads per rank and iteration, between commits after the warm-up."""
    by_rank: dict[int, list[WindowCommitted]] = defaultdict(list)
    for event in kind_of(events, WindowCommitted):
        if event.start >= warm_up:
            by_rank[event.rank].append(event)
    spans = [(of_rank[0], of_rank[-1]) for of_rank in by_rank.values() if len(of_rank) > 1]
    seconds = sum(last.helpers_s - first.helpers_s for first, last in spans)
    iterations = sum(_end(last) - _end(first) for first, last in spans)
    return seconds / iterations if iterations else 0.0


def _end(committed: WindowCommitted) -> int:
    return committed.start + len(committed.slots)


class OverheadBench(Bench):
    """Runs of the same job, protected in several ways, in one or several precisions.

    The name of a way is `<precision>/<variant>`.
    """

    PROG = 'moevement bench overhead'
    TITLES = {
        PLAIN: 'plain Megatron',
        SPARSE: 'sparse checkpointing',
        AGAINST: 'sparse checkpointing of the other checkout',
        DISK: 'sparse checkpointing, windows also to disk',
        DENSE_IN_MEMORY: 'dense in host memory each time (window 1)',
        SYNC: 'torch_dist each time',
        ASYNC: 'torch_dist each time, asynchronous',
    }
    ONLY = 'ways to protect a run, besides plain Megatron (default: all)', [*TITLES]
    WORDS = {'narrow': ','.join(name for name in precisions.FLAGS if name != BF16)}
    FIGURES = {
        'iteration_ms': Figure('iteration (ms)', '.0f', lambda run, plain: 1000 * run.iteration_s),
        'ratio': Figure('ratio', '.3f', lambda run, plain: run.iteration_s / plain.iteration_s),
        'cpu_s': Figure('CPU s / rank'),
        'cpu_ratio': Figure('CPU ratio', of=lambda run, plain: run.cpu_s / plain.cpu_s),
        'helpers': Figure('helpers', '.3f', lambda run, plain: run.helpers_s / plain.cpu_s),
        'exposed_ms': Figure('exposed (ms)', '.1f'),
        'overhead': Figure('overhead', '.3f'),
        'tmpfs_mb': Figure('tmpfs MB', '.0f'),
        'loss': Figure('loss', '.3f'),
        'windows': Figure('windows'),
        'slots': Figure('MiB of slots'),
    }

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        """Also set `share_gpu`, and the precisions to those of `FORMATS`."""
        if args.iterations < args.warm_up + 3:
            parser.error(f'--iterations {args.iterations}: must be at least --warm-up + 3')
        if args.against is not None and not (args.against / PROGRAM).is_file():
            parser.error(f'--against {args.against}: no checkout of this project ({PROGRAM})')
        args.share_gpu = args.precision is not None and not args.stand_ins
        if args.precision is None:
            if args.stand_ins:
                parser.error('--stand-ins is for --precision: give both')
            args.only = [one for one in args.only if args.against is not None or one != AGAINST]
            return
        if args.against is not None:
            parser.error('--against is not measured with --precision: leave one out')
        names = list(FORMATS) if args.precision == ALL else args.precision.split(',')
        if not set(names) <= set(FORMATS):
            known = ','.join(FORMATS)
            parser.error(f'--precision {args.precision}: must be {ALL} or some of {known}')
        args.precision = [BF16, *(name for name in names if name != BF16)]
        args.only = [SPARSE]
        args.window = _WINDOW_OF_FORMATS if args.window == AUTO else args.window
        if args.iterations < args.warm_up + int(args.window):
            parser.error(f'--iterations {args.iterations}: must be at least --warm-up + --window')
        try:
            precisions.program(args.stand_ins)
        except ValueError as error:
            parser.error(str(error))

    def titles(self) -> Mapping[str, str]:
        variants = [PLAIN, *(name for name in self.args.only if name != PLAIN)]
        measured = self.args.precision or [models.native_precision()]
        return {
            f'{name}/{one}': f'{name}: {self.TITLES[one]}' for name in measured for one in variants
        }

    def beside(self, way: str) -> str:
        return f'{way.rpartition("/")[0]}/{PLAIN}'

    def line(self, one: Run) -> str:
        return f'{one.iteration_s:7.3f} s'

    def run(self, way: str, number: int) -> Run:
        args, (precision, _, variant) = self.args, way.rpartition('/')
        folder = self.output / precision.replace(', ', '-') / f'{number}-{variant}'
        clock, peak = CpuClock(), [0]

        def sample(job: Job) -> None:
            for log in job.follow('the end', _POLL_S):
                clock.sample(job, log)
                peak[0] = max(peak[0], sum(file_bytes(memory)))

        with (
            memory_directory() as memory,
            tempfile.TemporaryDirectory(prefix='checkpoints-', dir=self.output) as checkpoints,
        ):
            own = self.protection(variant, memory, Path(checkpoints))
            flags = [*self.training_flags(precision), *own]
            if '--sparse-ckpt' in flags:
                flags += ['--sparse-ckpt-events', str(folder / 'events')]
            launch = Launch(folder, flags, NODES, 1, share_gpu=args.share_gpu)
            if args.precision:
                launch = launch._replace(program_file=precisions.program(args.stand_ins))
            checkout = args.against.resolve() if variant == AGAINST else ROOT
            found = train(launch._replace(checkout=checkout), sample, Launcher.TORCHRUN)
        return self._measured(variant, found, clock, peak[0])

    def _measured(self, variant: str, found: Trained, clock: CpuClock, peak: int) -> Run:
        args = self.args
        log, warm_up = found.log, args.warm_up
        if len(log.iterations) != args.iterations and not args.precision:
            raise LabError(f'{variant}: {len(log.iterations)} of {args.iterations} iterations')
        if variant == DISK and not kind_of(found.events, WindowOnDisk):
            raise LabError(f'{variant}: no window was copied to disk; take more --iterations')
        seconds = log.wall_seconds(warm_up)
        if not seconds:
            raise LabError(f'{variant}: no iteration after the first {warm_up} has a loss')
        slots = log.captured
        last = slots[-slots[-1].window :] if slots else []
        exposed = [slot.exposed_ms for slot in slots[warm_up:]]
        measured = log.iterations[warm_up - 1 :]
        cpu_s = clock.seconds(measured[0].time, measured[-1].time)
        return Run(
            iteration_s=statistics.median(seconds),
            all_iterations_s=seconds,
            cpu_s=cpu_s / (len(seconds) * NODES),
            helpers_s=helpers_s(found.events, warm_up),
            exposed_ms=statistics.mean(exposed) if exposed else None,
            windows=' '.join(f'{n}' for n in sorted({slot.window for slot in slots})) or None,
            slots=' '.join(f'{slot.nbytes / _MIB:.1f}' for slot in last) or None,
            digest=found.state.digest,
            tmpfs_mb=peak / 1e6,
            loss=final_loss(log, args.iterations),
        )

    def training_flags(self, precision: str) -> list[str]:
        """Flags of plain Megatron; the last value of a flag counts."""
        args, again = self.args, precision == AGAIN
        kind = BF16 if again else precision
        flags = presets.measured_flags(self.data, args.iterations, kind)
        flags += ['--seed', '4321'] if again else []
        return [*flags, *(precisions.ENGINE if args.share_gpu else ())]

    def protection(self, variant: str, memory: Path, checkpoints: Path) -> list[str]:
        """Flags of a way to protect a run, except the folder of events."""
        sparse = sparse_flags(memory, presets.RUN_ID, self.args.window)
        # The next window is copied as soon as all ranks have copied the one before.
        disk = as_flags(sparse_ckpt_disk=checkpoints, sparse_ckpt_disk_every=1)
        flags = {
            SPARSE: sparse,
            AGAINST: sparse,
            DISK: [*sparse, *disk],
            DENSE_IN_MEMORY: sparse_flags(memory, presets.RUN_ID, 1),
            SYNC: dense_flags(checkpoints, 1, asynchronous=False),
            ASYNC: dense_flags(checkpoints, 1, asynchronous=True),
        }
        return flags.get(variant, [])

    def different(self, rounds: Sequence[Mapping[str, Run]]) -> list[str]:
        """Precisions of which not all runs ended in the same bits."""
        digests: dict[str, set[str]] = defaultdict(set)
        for way, run in (pair for one in rounds for pair in one.items()):
            digests[way.rpartition('/')[0]].add(run.digest)
        return [name for name, found in digests.items() if len(found) > 1]

    def notes(self, report: Report) -> Iterator[str]:
        args = self.args
        engine = ', stand-ins for Transformer Engine' if args.stand_ins else ''
        yield (
            f'{NODES} ranks on as many emulated nodes{engine}, {args.rounds} rounds of '
            f'{args.iterations} iterations, the first {args.warm_up} dropped; per round the '
            'median, over rounds the median (and the range). Slots are those of the last window of '
            'the last rank; one slot is what a dense checkpoint takes. Helpers: CPU time of Python '
            "threads other than the training thread, over all of plain Megatron's. Losses: mean of "
            'the last tenth of the iterations, - after a NaN.'
        )
        verdict = f'DIFFERENT in {", ".join(report.different)}' if report.different else 'equal'
        yield f'Final states of all runs of a precision, bit for bit: {verdict}.'


main = OverheadBench.main
