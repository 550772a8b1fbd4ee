# SPDX-License-Identifier: Apache-2.0
"""Injects random faults into training jobs and checks that they end as without faults.

    moevement chaos --faults 20 --seed 1
    moevement chaos --faults 1000 --seed 1 --configurations 20
    moevement chaos --without-spares --faults 100 --seed 1
    moevement chaos --elastic --faults 20 --seed 1

A small GPT trains on real text under a launcher that replaces single workers. At random moments the
campaign kills, stops or blocks workers, deletes the memory of nodes, or kills launchers; of a
`double` the second kill may hit the recovery from the first. Only if --kinds names them, it also
kills or stops the coordinator, before or after it kills a worker. With `--configurations` layout,
precision, features of Megatron, window, replicas, spares and launcher are drawn as well; a
configuration that plain Megatron refuses is drawn again. The final state of every job is compared,
bit for bit, with that of plain Megatron with the same flags and without faults. The same seed draws
the same faults; the moment within an iteration depends on the machine.

A fault has one of three outcomes: `localized` (the other workers kept their state), `whole_job`
(all workers restarted and recovered from host memory), `disk` (from a dense checkpoint, or from the
start). An iteration is lost if the last rank had logged it before the recovery and the job trains
it again after the recovery; iterations replayed within the recovery are not lost, nor are
iterations that were interrupted before they were committed: no rank had them. A survivor is lost if
a worker without a fault fails, unless its end makes the launcher restart the whole job.

With `--without-spares` the jobs have four nodes and no spare one (`--when-no-spare guests`), in
drawn layouts. Nodes are lost for good with their memory, at most as many as windows have copies,
so that their ranks become guests of others; workers, guests and hosts fail meanwhile, and nodes
return.

jobs/campaign.jsonl in the output folder has the results.

With `--elastic` each fault kills all processes of one job, which starts again in another layout, of
2 to 4 ranks (`--sparse-ckpt-elastic restart`). The last state is compared with that of plain
Megatron, which goes through the same layouts from one checkpoint to the next. Only --faults, --seed
and --output have an effect then.

Exit status: 0 all faults were injected, nothing was lost and all states are equal, 1 otherwise, 2 a
job failed.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from ..lab.job import Kind, memory_directory
from ..lab.models import prepare
from ..lab.programs import program, run_tool
from ..lab.tables import say
from .campaign import Campaign
from .configuration import WITHOUT_SPARES
from .elastic import ElasticCampaign, draw_lives
from .injecting import AT_COORDINATOR
from .results import NAME, Begun, Results

_MOST_SHOWN = 8
_ALWAYS = (Kind.KILL, Kind.STOP, Kind.NODE, Kind.DOUBLE)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    words = {'kinds': ','.join(Kind), 'always': ','.join(_ALWAYS)}
    parser = program('chaos', __doc__, words)
    args = parser.parse_args(argv)
    args.seed = time.time_ns() if args.seed is None else args.seed
    if args.stand_ins and (args.share_gpu or not args.configurations):
        parser.error('--stand-ins needs --configurations, and a CPU: leave out --share-gpu')
    if args.without_spares:
        args.configurations = args.configurations or len(WITHOUT_SPARES)
    usual = [kind for kind in Kind if kind not in AT_COORDINATOR]
    names = (args.kinds or ','.join(usual if args.configurations else _ALWAYS)).split(',')
    if not set(names) <= set(Kind):
        parser.error(f'--kinds {args.kinds} must be some of {",".join(Kind)}')
    args.kinds = [Kind(name) for name in names]
    if not args.configurations and Kind.AGENT in args.kinds:
        parser.error(f'--kinds {Kind.AGENT} needs torchrun, which only --configurations draw')
    args.arguments = list(sys.argv[1:] if argv is None else argv)
    return args


def verdict(args: argparse.Namespace, results: Results) -> int:
    if results.failed:
        return 2
    few = len(results.faults) < args.faults
    return 1 if few or not results.sound else 0


def main(argv: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    args = parse_arguments(argv)
    print(f'chaos: seed {args.seed}', flush=True)
    work = partial(_run_elastic if args.elastic else _run, args)
    return run_tool(f'chaos: seed {args.seed}', work)


def _run(args: argparse.Namespace, console: Console) -> int:
    output, data = prepare(args, 'jobs')
    results = Results(output / NAME)
    results.add(Begun(args.arguments, args.seed))
    Campaign(output, data, args, results, console).run()
    injected = len(results.faults)
    wrong = [f'job {job.number} failed: {job.failed}' for job in results.failed]
    wrong += [f'{injected} of {args.faults} faults were injected'] * (injected < args.faults)
    for line in wrong:
        say(console, f'chaos: {line}', style='bold red')
    print(results.summary(), flush=True)
    return verdict(args, results)


def _run_elastic(args: argparse.Namespace, console: Console) -> int:
    output, data = prepare(args, 'jobs')
    with memory_directory('moevement-chaos-') as memory:
        lives = draw_lives(args.seed, args.faults)
        campaign = ElasticCampaign(output, data, memory, lives)
        for lived in campaign.live():
            say(console, lived.line())
        different, growth = campaign.different(), campaign.growth()
    wrong = [f'differs: rank {one.rank}: {one.name}' for one in different[:_MOST_SHOWN]]
    for line in [*wrong, *([growth] if growth else [])]:
        say(console, f'chaos: {line}', style='bold red')
    print(campaign.summary(not different), flush=True)
    return 1 if different or growth else 0


if __name__ == '__main__':
    sys.exit(main())
