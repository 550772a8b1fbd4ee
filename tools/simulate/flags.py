# SPDX-License-Identifier: Apache-2.0
"""The flags that the simulator and its sweeps share, and what they describe."""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.simulate import fields, run_profile
from tools.simulate.failures import Correlated, Process, Renewal
from tools.simulate.fields import FieldError
from tools.simulate.monte_carlo import Estimate, Spares, simulate
from tools.simulate.partial import SELECTIONS
from tools.simulate.pipeline import Pipeline
from tools.simulate.popularity import draw_shares
from tools.simulate.profile import Profile, read_profile
from tools.simulate.runs import Run
from tools.simulate.systems import INTERVAL_RULES, Options, System, build
from tools.simulate.trace import Trace, read_trace

GB = 1e9

FLAG_OF_FIELD = {
    'iteration_s': '--iteration-time',
    'overhead_s': '--overhead',
    'stall_s': '--stall',
    'restart_s': '--restart-time',
    'mtbf_s': '--mtbf',
    'copy_s': '--copy-time',
    'copy_bytes_per_s': '--copy-bandwidth',
    'network_bytes_per_s': '--network-bandwidth',
    'disk_bytes_per_s': '--disk-bandwidth',
    'job_s': '--job-hours',
    'saved': '--saved-experts',
    'shape': '--weibull-shape',
    'repeat_after_s': '--repeat-after',
    'repair_s': '--repair-time',
    'count': '--spares',
}
"""Where the flag is not the field's own name."""


class Times(NamedTuple):
    """A multiple of what the profile says."""

    factor: float


def mtbf(text: str) -> float | Times:
    """Seconds, or `0.5x`."""
    value = float(text.removesuffix('x'))
    return Times(value) if text.endswith('x') else value


LENGTH_MATTERS = ('moc', 'moetion')
"""Systems that count the tokens lost in a job."""


def flag_error(error: FieldError) -> str:
    """The message with the flag in the field's place."""
    flag = FLAG_OF_FIELD.get(error.field, '--' + error.field.replace('_', '-'))
    return f'{flag} {error.problem}'


class _Flag(NamedTuple):
    name: str
    type: Callable[[str], object]
    help: str
    default: object = None


_COSTS = [
    _Flag('--iteration-time', float, 'seconds of an iteration without fault tolerance'),
    _Flag('--interval', int, 'iterations from one dense checkpoint to the next'),
    _Flag('--window', int, 'iterations of a window of sparse checkpointing'),
    _Flag('--overhead', float, 'seconds that are added to each iteration, on average'),
    _Flag('--stall', float, 'seconds that training waits once per dense checkpoint'),
    _Flag('--restart-time', float, 'seconds from a failure until the replay begins'),
    _Flag('--local-saving', float, 'share saved of a replayed iteration: few stages only', 0.0),
    _Flag('--frozen-saving', float, 'share of the work of a frozen operator that is saved', 0.0),
    _Flag('--copy-time', float, "seconds to copy a rank's state from a data-parallel copy"),
    _Flag('--overhead-bound', float, 'of CheckFreq, share of an iteration (default: 0.035)', 0.035),
    _Flag('--experts', int, 'experts per layer'),
    _Flag('--saved-experts', int, 'experts in each checkpoint of moc and moetion'),
    _Flag('--lost-budget', float, 'PLT beyond which moc doubles the saved experts (paper: 0.0375)'),
    _Flag('--skew', float, "of the experts' popularity, 0 (none) to below 1 (drawn at random)"),
]  # fmt: skip
_MACHINE = [
    _Flag(
        '--profile',
        Path,
        'what was measured, to price what no flag gives: a JSON file, or the '
        'folder of --sparse-ckpt-events of a run',
    ),
    _Flag('--copy-bandwidth', float, "GB/s of a rank to host memory, instead of the profile's"),
    _Flag('--network-bandwidth', float, "GB/s of a rank's share of the network"),
    _Flag('--disk-bandwidth', float, "GB/s of a rank's share of the storage"),
    _Flag('--nodes', int, 'of the job'),
    _Flag('--stages', int, 'pipeline stages'),
    _Flag('--micro-batches', int, 'per iteration'),
    _Flag('--copies', int, 'nodes of a stage that hold the same state'),
]
_FAILURES = [
    _Flag(
        '--mtbf',
        mtbf,
        'mean seconds between failures of the job (inf: none), or as 0.5x: so '
        'many times what the profile says, which is the default',
    ),
    _Flag('--gpus', int, 'of the job; with --gpu-hours-per-failure instead of --mtbf'),
    _Flag('--gpu-hours-per-failure', float, 'e.g. 50000 (Llama 3), 30000, 7500 (OPT-175B)'),
    _Flag('--weibull-shape', float, 'of the gaps; below 1 failures come in bunches', 1.0),
    _Flag('--neighbours', float, 'mean number of further nodes lost with a failed one', 0.0),
    _Flag('--repeat', float, 'probability that a failed node fails again soon', 0.0),
    _Flag('--repeat-after', float, 'mean seconds until it does (default: 3600)', 3600.0),
    _Flag('--trace', Path, 'CSV file with the columns time,node,event instead of random failures'),
    _Flag('--spares', int, 'nodes in reserve (default: always enough)'),
    _Flag('--repair-time', float, 'seconds until a failed node is a spare', 0.0),
]
_SIMULATION = [
    _Flag('--hours', float, 'to simulate, over all histories together'),
    _Flag('--job-hours', float, 'length of the job, each history from a fresh start'),
    _Flag('--histories', int, 'independent ones'),
    _Flag('--seed', int, 'of the random numbers (default: 0)', 0),
]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All flags but the choice of systems."""
    groups = (
        ('costs', _COSTS),
        ('machine', _MACHINE),
        ('failures', _FAILURES),
        ('simulation', _SIMULATION),
    )
    for title, flags in groups:
        group = parser.add_argument_group(title)
        for flag in flags:
            group.add_argument(flag.name, type=flag.type, default=flag.default, help=flag.help)
    choices = parser.add_argument_group('choices')
    choices.add_argument(
        '--interval-rule',
        choices=INTERVAL_RULES,
        default='oracle',
        help='how gemini chooses its interval (default: oracle)',
    )
    choices.add_argument(
        '--selection',
        choices=SELECTIONS,
        default='sequential',
        help='how moc chooses experts (default: sequential)',
    )
    choices.add_argument(
        '--recovery',
        choices=('global', 'localized'),
        default='global',
        help='who replays; localized needs --stages',
    )
    choices.add_argument(
        '--order',
        choices=('popularity', 'given'),
        default='popularity',
        help='of the operators in a window (default: popularity)',
    )
    choices.add_argument(
        '--restore',
        choices=('streaming', 'whole'),
        default='streaming',
        help='load slots beside the replay, or all before it',
    )


@dataclass(frozen=True)
class Scenario:
    """Everything that the flags describe, but the system."""

    options: Options
    profile: Profile | None
    process: Process
    pipeline: Pipeline
    spares: Spares | None
    hours: float | None
    job_hours: float | None
    histories: int | None
    seed: int

    def system(self, name: str) -> System:
        """Raises FieldError, InfeasiblePlan."""
        return build(name, self.options, self.profile)

    def simulate(self, system: System, *, whole_jobs: bool = False) -> tuple[Estimate, Run | None]:
        """The estimate, and the Run with what else it counted, if the system has its own.

        With `whole_jobs` each history is a job from its start. Raises FieldError.
        """
        made: list[Run] = []

        def make(histories: int, rng: np.random.Generator) -> Run:
            assert system.run is not None
            made.append(system.run(histories, rng))
            return made[0]

        # The length of a job matters where costs change or failures bunch.
        whole_jobs |= system.name in LENGTH_MATTERS or not isinstance(self.process, Renewal)
        estimate = simulate(
            make if system.run else system.costs,
            self.process,
            nodes=self.pipeline.nodes,
            spares=self.spares,
            hours=self.hours,
            job_hours=self.job_hours if whole_jobs else None,
            histories=self.histories,
            seed=self.seed,
        )
        return estimate, made[0] if made else None


def scenario(args: argparse.Namespace) -> Scenario:
    """Raises FieldError, ProfileError, TraceError."""
    profile = _profile(args)
    pipeline = _pipeline(args, profile)
    process = _process(args, profile)
    if isinstance(process, Trace):
        pipeline = replace(pipeline, nodes=args.nodes or max(pipeline.nodes, len(process.names)))
    spares = None
    fields.not_negative('repair_s', args.repair_time)
    if args.spares is not None:
        spares = Spares(args.spares, args.repair_time)
    options = Options(
        iteration_s=args.iteration_time,
        interval=args.interval,
        window=args.window,
        overhead_s=args.overhead,
        stall_s=args.stall,
        restart_s=args.restart_time,
        mtbf_s=process.mtbf_s,
        local_saving=args.local_saving,
        frozen_saving=args.frozen_saving,
        pipeline=pipeline,
        localized=args.recovery == 'localized',
        streaming=args.restore == 'streaming',
        shares=_shares(args, profile),
        by_popularity=args.order == 'popularity',
        interval_rule=args.interval_rule,
        overhead_bound=args.overhead_bound,
        experts=args.experts,
        saved=args.saved_experts,
        selection=args.selection,
        lost_budget=args.lost_budget,
        job_s=None if args.job_hours is None else args.job_hours * 3600,
        copy_s=args.copy_time,
    )
    return Scenario(
        options,
        profile,
        process,
        pipeline,
        spares,
        args.hours,
        args.job_hours,
        args.histories,
        args.seed,
    )


def _profile(args: argparse.Namespace) -> Profile | None:
    if args.profile is None:
        return None
    flags = {
        'copy_bytes_per_s': args.copy_bandwidth,
        'network_bytes_per_s': args.network_bandwidth,
        'disk_bytes_per_s': args.disk_bandwidth,
    }
    given = {name: gb * GB for name, gb in flags.items() if gb is not None}
    if args.profile.is_dir():
        if args.recovery == 'localized' and args.micro_batches is None:
            raise FieldError('micro_batches', 'is missing; the events of a run do not say it')
        return run_profile.derive(args.profile, given)
    return replace(read_profile(args.profile), **given)


def _pipeline(args: argparse.Namespace, profile: Profile | None) -> Pipeline:
    base = profile.pipeline if profile else Pipeline()
    names = ('nodes', 'stages', 'micro_batches', 'copies')
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    for name, value in given.items():
        fields.whole(name, value)
    if 'nodes' not in given and base.nodes == 1:
        given['nodes'] = given.get('stages', base.stages) * given.get('copies', base.copies)
    return replace(base, **given)


def _process(args: argparse.Namespace, profile: Profile | None) -> Process:
    if args.trace is not None:
        return read_trace(args.trace)
    mtbf_s = _mtbf_s(args, profile)
    if mtbf_s is None:
        if args.gpus is None or args.gpu_hours_per_failure is None:
            raise FieldError('mtbf', 'is missing; give it, or --gpus and --gpu-hours-per-failure')
        for name in ('gpus', 'gpu_hours_per_failure'):
            if not getattr(args, name) > 0:
                raise FieldError(name, f'is {getattr(args, name)!r}; give a number above 0')
        mtbf_s = args.gpu_hours_per_failure * 3600 / args.gpus
    if args.neighbours or args.repeat:
        if args.weibull_shape != 1:
            raise FieldError('shape', 'cannot be combined with --neighbours or --repeat')
        return Correlated(mtbf_s, args.neighbours, args.repeat, args.repeat_after)
    return Renewal(mtbf_s, args.weibull_shape)


def _mtbf_s(args: argparse.Namespace, profile: Profile | None) -> float | None:
    """Seconds, if the flag or else the profile says so; a rate by GPUs goes before the profile."""
    if isinstance(args.mtbf, float | int):
        return args.mtbf
    measured = profile.mtbf_s if profile else None
    if isinstance(args.mtbf, Times):
        if measured is None:
            raise FieldError('mtbf', 'is a multiple, but there is no profile of a run that failed')
        return measured * args.mtbf.factor
    return None if args.gpu_hours_per_failure is not None else measured


def _shares(args: argparse.Namespace, profile: Profile | None) -> np.ndarray | None:
    if args.skew is None:
        return None
    experts = args.experts
    if experts is None and profile is not None:
        shares = profile.token_shares()
        experts = None if shares is None else len(shares)
    if experts is None:
        raise FieldError('experts', 'is missing; a skew is over a number of experts')
    return draw_shares(args.skew, experts, args.seed)


@contextmanager
def plot_errors(parser: argparse.ArgumentParser, target: Path) -> Iterator[None]:
    """Exit with a message if the image cannot be written, or is of a format that none knows."""
    try:
        yield
    except OSError as error:
        parser.error(f'--plot {target}: {error.strerror}')
    except ValueError as error:
        parser.error(f'--plot {target}: {error}')


def finite(value: object) -> object:
    """For JSON, which has no infinity: None in its place, inside dicts and lists too."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
