# SPDX-License-Identifier: Apache-2.0
"""Injects random faults into training jobs and checks that they end as without faults.

    moevement chaos --faults 20 --seed 1
    moevement chaos --faults 1000 --seed 1 --configurations 20
    moevement chaos --resume runs/chaos
    moevement chaos --elastic --faults 20 --seed 1

A small GPT trains on real text under a launcher that replaces single workers. At random moments the
campaign kills, stops or blocks workers, deletes the memory of nodes, or kills launchers; of a
`double` the second kill may hit the recovery from the first. With `--configurations` layout,
precision, features of Megatron, window, replicas, spares and launcher are drawn as well; a
configuration that plain Megatron refuses is drawn again. The final state of every job is compared,
bit for bit, with that of plain Megatron with the same flags and without faults. The same seed draws
the same faults; the moment within an iteration depends on the machine.

A fault has one of three outcomes: `localized` (the other workers kept their state), `whole_job`
(all workers restarted and recovered from host memory), `disk` (from a dense checkpoint, or from the
start). An iteration is lost if the last rank had logged it before the recovery and the job trains
it again after the recovery; iterations replayed within the recovery are not lost, nor are
iterations that were interrupted before they were committed: no rank had them. A survivor is lost if
a worker without a fault fails or is evicted, unless its end makes the launcher restart the whole
job.

The table counts faults by the phase in which they landed, according to the events of the hit worker
(or of the other workers, if the hit worker had not noticed the failure yet or was starting).
campaign.jsonl in the output folder has the results; `--resume` continues with the interrupted job.

With `--elastic` each fault kills all processes of one job, which starts again in another layout, of
2 to 4 ranks (`--sparse-ckpt-elastic restart`). The last state is compared with that of plain
Megatron, which goes through the same layouts from one checkpoint to the next. Only --faults, --seed
and --output have an effect then.

Exit status: 0 all faults were injected, nothing was lost and all states are equal, 1 otherwise, 2 a
job failed.
"""

import argparse
import fcntl
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rich.console import Console

from moevement_ext.config import ConfigurationError

from ..lab.arguments import Parser
from ..lab.benchmark import exit_on_sigterm, print_failure
from ..lab.digests import DigestFileError
from ..lab.errors import LabError
from ..lab.job import Kind, memory_directory
from ..lab.launch import add_share_gpu
from ..lab.models import prepare_text
from .campaign import Campaign
from .configuration import HANG_TIMEOUT_S
from .elastic import ElasticCampaign, draw_lives, run_here
from .results import NAME, Begun, ResultError, Results, landing_table

_MOST_SHOWN = 8
_ALWAYS = (Kind.KILL, Kind.STOP, Kind.NODE, Kind.DOUBLE)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog='moevement chaos', description=__doc__)
    add = parser.add_argument
    add('--faults', type=int, default=20, help='number of faults (default: 20)')
    add('--seed', type=int, help='seed of all draws (default: the time)')
    add('--configurations', type=int, help='number to draw (default: pp2-ep2 in bf16 alone)')
    add('--fork', action='store_true', help='fork the workers of the local launcher from one '
        'process that has imported Megatron, instead of hot spares: quick starts')  # fmt: skip
    add('--kinds', help=f'of {",".join(Kind)} (default: {",".join(_ALWAYS)}; all of them with '
        '--configurations)')  # fmt: skip
    add('--faults-per-job', type=int, default=10, help='limit per job (default: 10)')
    add('--hang-timeout', type=int, default=HANG_TIMEOUT_S, metavar='SECONDS',
        help='time without a heartbeat after which a worker is replaced; on a busy machine a '
        'starting worker may need longer (default: %(default)s)')  # fmt: skip
    add('--max-stall', type=float, metavar='SECONDS', help='fail if a recovery takes longer, '
        'not counting hang detection and the start of processes')  # fmt: skip
    add('--output', type=Path, default=Path('runs/chaos'), help='folder for data and logs')
    add_share_gpu(parser)
    add('--stand-ins', action='store_true', help='with --configurations: draw state of 16 and 8 '
        'bits as well, on stand-ins for Transformer Engine that are part of the tests (with '
        '--share-gpu it is drawn where Transformer Engine is installed)')  # fmt: skip
    add('--resume', type=Path, metavar='DIR', help='continue the campaign in this folder')
    add('--elastic', action='store_true', help='restart one job in drawn layouts instead')
    args = parser.parse_args(argv)
    try:
        if args.resume is not None:
            return _resumed(args.resume)
        check(args)
    except (ValueError, ResultError) as error:
        parser.error(str(error))
    args.arguments = list(sys.argv[1:] if argv is None else argv)
    return args


def _resumed(folder: Path) -> argparse.Namespace:
    begun = Results(folder / NAME).begun()
    args = parse_arguments(begun.arguments)
    args.resume = args.output = folder
    args.seed = begun.seed
    return args


def check(args: argparse.Namespace) -> None:
    """Convert texts to values, in place.

    Raises:
        ValueError: a flag breaks a rule; the message names both.
    """
    for name in ('faults', 'faults_per_job', 'configurations', 'hang_timeout'):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f'--{name.replace("_", "-")} must be at least 1')
    if args.fork and args.share_gpu:
        raise ValueError('--fork --share-gpu: CUDA does not work in a fork; leave out --fork')
    if args.stand_ins and (args.share_gpu or not args.configurations):
        raise ValueError('--stand-ins needs --configurations, and a CPU: leave out --share-gpu')
    default = ','.join(Kind if args.configurations else _ALWAYS)
    names = [name for name in (args.kinds or default).split(',') if name]
    if not names or not set(names) <= set(Kind):
        raise ValueError(f'--kinds {args.kinds} must be some of {",".join(Kind)}')
    args.kinds = [Kind(name) for name in names]
    if not args.configurations and Kind.AGENT in args.kinds:
        raise ValueError(f'--kinds {Kind.AGENT} needs torchrun, which only --configurations draw')


def _campaign(args: argparse.Namespace, results: Results, console: Console) -> Campaign:
    output = args.output.resolve()
    return Campaign(output, prepare_text(output / 'data'), args, results, console)


def lock(output: Path) -> IO[bytes]:
    """Open a file that keeps other campaigns out of a folder until it is closed.

    Raises:
        ResultError: another campaign runs in the folder, or the folder has other files.
    """
    output.mkdir(parents=True, exist_ok=True)
    there = {path.name for path in output.iterdir()}
    if there and there.isdisjoint(('lock', NAME)):
        raise ResultError(f'--output {output}: has files, but no campaign; name another folder')
    file = (output / 'lock').open('wb')
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ResultError(f'{output}: another campaign is under way there') from error
    return file


def _clear(output: Path) -> None:
    """Delete what earlier campaigns of either kind wrote."""
    for stale in output.iterdir():
        if re.fullmatch(r'(job|life|plain)\d+(-.*)?', stale.name):
            shutil.rmtree(stale, ignore_errors=True)
    (output / NAME).unlink(missing_ok=True)


def verdict(args: argparse.Namespace, results: Results) -> int:
    if results.failed:
        return 2
    stalled = args.max_stall is not None and results.longest_stall_s > args.max_stall
    wrong = results.lost_iterations or results.survivors_lost
    few = len(results.faults) < args.faults
    return 1 if wrong or few or stalled or not results.identical else 0


def main(argv: Sequence[str] | None = None) -> int:
    exit_on_sigterm()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    args = parse_arguments(argv)
    console = Console()
    try:
        with lock(args.output):
            return _run(args, console)
    except ResultError as error:
        console.print(f'chaos: {error}', style='bold red', markup=False)
        return 2


def _run(args: argparse.Namespace, console: Console) -> int:
    if args.elastic:
        return _run_elastic(args, console)
    if args.resume is None:
        args.seed = time.time_ns() if args.seed is None else args.seed
        _clear(args.output)
    results = Results(args.output / NAME)
    if args.resume is None:
        results.add(Begun(args.arguments, args.seed))
    console.print(f'chaos: seed {args.seed}', highlight=False)
    try:
        _campaign(args, results, console).run()
    except (ConfigurationError, DigestFileError) as error:
        console.print(f'chaos: {error}', style='bold red', markup=False)
        return 2
    except LabError as error:
        print_failure(console, f'chaos: seed {args.seed}', error)
        return 2
    console.print(landing_table(cell for fault in results.faults for cell in fault.cells))
    for job in results.failed:
        failed = f'chaos: job {job.number} failed: {job.failed}'
        console.print(failed, style='bold red', markup=False)
    if len(results.faults) < args.faults:
        injected = f'chaos: {len(results.faults)} of {args.faults} faults were injected'
        console.print(injected, style='bold red', highlight=False)
    console.print(f'chaos: longest stall {results.longest_stall_s:.1f} s', highlight=False)
    print(results.summary(), flush=True)
    return verdict(args, results)


def _run_elastic(args: argparse.Namespace, console: Console) -> int:
    seed = time.time_ns() if args.seed is None else args.seed
    output = args.output.resolve()
    _clear(output)
    console.print(f'chaos: seed {seed}', highlight=False)
    try:
        with memory_directory('moevement-chaos-') as memory:
            campaign = ElasticCampaign(
                output,
                prepare_text(output / 'data'),
                memory,
                draw_lives(seed, args.faults),
                run_here,
            )
            for lived in campaign.live():
                console.print(lived.line(), markup=False, highlight=False)
            different, growth = campaign.different(), campaign.growth()
    except LabError as error:
        print_failure(console, f'chaos: seed {seed}', error)
        return 2
    for one in different[:_MOST_SHOWN]:
        differs = f'chaos: differs: rank {one.rank}: {one.name}'
        console.print(differs, style='bold red', markup=False)
    if growth:
        console.print(f'chaos: {growth}', style='bold red', markup=False)
    print(campaign.summary(not different), flush=True)
    return 1 if different or growth else 0


if __name__ == '__main__':
    sys.exit(main())
