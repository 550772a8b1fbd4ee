# SPDX-License-Identifier: Apache-2.0
"""Common flags of the simulator and its sweeps, and the scenario that they describe."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from moevement_ext.plan.byte_planner import InfeasiblePlan

from ..lab.arguments import Flag, add_flags
from ..model import fields
from ..model.description import GIGA, DescriptionError, read
from ..model.description import mtbf_s as mtbf_of
from ..model.fields import FieldError, NotNegative, Positive
from . import profile as profiles
from .experts import SELECTIONS, draw_shares
from .failures import Correlated, Process, Renewal, Trace, TraceError, read_trace
from .monte_carlo import Estimate, Spares, simulate
from .profile import Profile
from .runs import Pipeline
from .systems import INTERVAL_RULES, PARTIAL_SYSTEMS, Options, System, build

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
"""Flags whose name differs from the field's."""
# Fields of Options that have a flag each.
_GIVEN = (
    'iteration_s interval window overhead_s stall_s restart_s local_saving frozen_saving copy_s '
    'interval_rule overhead_bound experts saved selection lost_budget'
).split()


class Times(NamedTuple):
    """A multiple of the profile's value."""

    factor: float


def mtbf(text: str) -> float | Times:
    """Parse seconds, or a multiple such as `0.5x`."""
    value = float(text.removesuffix('x'))
    return Times(value) if text.endswith('x') else value


@contextmanager
def errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Exit with a message about bad input; replaces a field's name by its flag."""
    try:
        yield
    except FieldError as error:
        flag = FLAG_OF_FIELD.get(error.field, '--' + error.field.replace('_', '-'))
        parser.error(f'{flag} {error.problem}')
    except (InfeasiblePlan, DescriptionError, TraceError) as error:
        parser.error(str(error))


_COSTS = [
    Flag('--iteration-time', 'seconds of an iteration without fault tolerance', float),
    Flag('--interval', 'iterations from one dense checkpoint to the next', int),
    Flag('--window', 'iterations of a window of sparse checkpointing', int),
    Flag('--overhead', 'seconds that are added to each iteration, on average', float),
    Flag('--stall', 'seconds that training waits once per dense checkpoint', float),
    Flag('--restart-time', 'seconds from a failure until the replay begins', float),
    Flag('--local-saving', 'share saved of a replayed iteration: few stages only', float, 0.0),
    Flag('--frozen-saving', 'share of the work of a frozen operator that is saved', float, 0.0),
    Flag('--copy-time', "seconds to copy a rank's state from a data-parallel copy", float),
    Flag('--overhead-bound', 'of CheckFreq, share of an iteration (default: 0.03)', float, 0.03),
    Flag('--experts', 'experts per layer; a profile does not have their number', int),
    Flag('--saved-experts', 'experts in each checkpoint of moc and moetion', int),
    Flag('--lost-budget', 'PLT beyond which moc doubles the saved experts (paper: 0.0375)', float),
    Flag('--skew', "of the experts' popularity, 0 (none) to below 1 (drawn at random)", float),
]
_MACHINE = [
    Flag('--profile', 'measurements, for costs that no flag gives: a JSON file, or the '
         'folder of --sparse-ckpt-events of a run', Path),
    Flag('--copy-bandwidth', "GB/s of a rank to host memory, instead of the profile's", float),
    Flag('--network-bandwidth', "GB/s of a rank's share of the network", float),
    Flag('--disk-bandwidth', "GB/s of a rank's share of the storage", float),
    Flag('--nodes', 'nodes of the job', int),
    Flag('--stages', 'pipeline stages', int),
    Flag('--micro-batches', 'micro-batches per iteration', int),
    Flag('--copies', 'nodes of a stage that hold the same state', int),
]  # fmt: skip
_FAILURES = [
    Flag('--mtbf', 'mean seconds between failures of the job (inf: none), or a multiple of '
         "the profile's value such as 0.5x (default: that value)", mtbf),
    Flag('--gpus', 'GPUs of the job; with --gpu-hours-per-failure instead of --mtbf', int),
    Flag('--gpu-hours-per-failure', 'e.g. 50000 (Llama 3), 30000, 7500 (OPT-175B)', float),
    Flag('--weibull-shape', 'shape of the gaps; below 1 failures come in bunches', float, 1.0),
    Flag('--neighbours', 'mean number of further nodes lost with a failed one', float, 0.0),
    Flag('--repeat', 'probability that a failed node fails again soon', float, 0.0),
    Flag('--repeat-after', 'mean seconds until then (default: 3600)', float, 3600.0),
    Flag('--trace', 'CSV file with the columns time,node,event instead of random failures', Path),
    Flag('--spares', 'nodes in reserve (default: always enough)', int),
    Flag('--repair-time', 'seconds until a failed node is a spare', float, 0.0),
]  # fmt: skip
_SIMULATION = [
    Flag('--hours', 'hours to simulate, over all histories', float),
    Flag('--job-hours', 'length of the job, each history from a fresh start', float),
    Flag('--histories', 'number of independent histories', int),
    Flag('--seed', 'seed of the random numbers (default: 0)', int, 0),
]
_CHOICES = [
    Flag('--interval-rule', 'how gemini chooses its interval (default: oracle)',
         default='oracle', choices=INTERVAL_RULES),
    Flag('--selection', 'how moc chooses experts (default: sequential)',
         default='sequential', choices=SELECTIONS),
    Flag('--recovery', 'the stages that replay; localized needs --stages',
         default='global', choices=('global', 'localized')),
    Flag('--order', 'of the operators in a window (default: popularity)',
         default='popularity', choices=('popularity', 'given')),
    Flag('--restore', 'load slots during the replay, or all before it',
         default='streaming', choices=('streaming', 'whole')),
]  # fmt: skip
_GROUPS = {
    'costs': _COSTS, 'machine': _MACHINE, 'failures': _FAILURES, 'simulation': _SIMULATION,
    'choices': _CHOICES,
}  # fmt: skip


def add_scenario_flags(parser: argparse.ArgumentParser) -> None:
    for title, group in _GROUPS.items():
        add_flags(parser.add_argument_group(title), *group)


class Scenario(NamedTuple):
    """Everything that the flags describe, except the system."""

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
        """Build a system. Raises FieldError, InfeasiblePlan."""
        return build(name, self.options, self.profile)

    def simulate(self, system: System) -> Estimate:
        """Raises FieldError."""
        # The length of a job matters if costs change or failures bunch.
        whole_jobs = system.name in PARTIAL_SYSTEMS or not isinstance(self.process, Renewal)
        return simulate(
            system.run or system.costs,
            self.process,
            nodes=self.pipeline.nodes,
            spares=self.spares,
            hours=self.hours,
            job_hours=self.job_hours if whole_jobs else None,
            histories=self.histories,
            seed=self.seed,
        )


def scenario(args: argparse.Namespace) -> Scenario:
    """Build the scenario of the flags. Raises FieldError, DescriptionError, TraceError."""
    profile = _profile(args)
    pipeline = _pipeline(args, profile)
    process = _process(args, profile)
    if isinstance(process, Trace):
        pipeline = replace(pipeline, nodes=args.nodes or max(pipeline.nodes, len(process.names)))
    spares = None
    fields.number('repair_s', args.repair_time, NotNegative)
    if args.spares is not None:
        spares = Spares(args.spares, args.repair_time)
    given = {name: getattr(args, _dest(name)) for name in _GIVEN}
    options = Options(
        **given,
        mtbf_s=process.mtbf_s,
        pipeline=pipeline,
        localized=args.recovery == 'localized',
        streaming=args.restore == 'streaming',
        shares=_shares(args, profile),
        by_popularity=args.order == 'popularity',
        job_s=None if args.job_hours is None else args.job_hours * 3600,
    )
    rest = args.hours, args.job_hours, args.histories, args.seed
    return Scenario(options, profile, process, pipeline, spares, *rest)


def _dest(field: str) -> str:
    return FLAG_OF_FIELD.get(field, field).removeprefix('--').replace('-', '_')


def _profile(args: argparse.Namespace) -> Profile | None:
    if args.profile is None:
        return None
    flags = {
        'copy_bytes_per_s': args.copy_bandwidth,
        'network_bytes_per_s': args.network_bandwidth,
        'disk_bytes_per_s': args.disk_bandwidth,
    }
    given = {name: gb * GIGA for name, gb in flags.items() if gb is not None}
    if args.profile.is_dir():
        if args.recovery == 'localized' and args.micro_batches is None:
            raise FieldError('micro_batches', 'is missing; the events of a run do not say it')
        return profiles.derive(args.profile, given)
    return replace(read(args.profile, Profile), **given)


def _pipeline(args: argparse.Namespace, profile: Profile | None) -> Pipeline:
    base = profile.pipeline if profile else Pipeline()
    names = ('nodes', 'stages', 'micro_batches', 'copies')
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
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
            fields.number(name, getattr(args, name), Positive)
        mtbf_s = mtbf_of(args.gpu_hours_per_failure, args.gpus)
    if args.neighbours or args.repeat:
        if args.weibull_shape != 1:
            raise FieldError('shape', 'cannot be combined with --neighbours or --repeat')
        return Correlated(mtbf_s, args.neighbours, args.repeat, args.repeat_after)
    return Renewal(mtbf_s, args.weibull_shape)


def _mtbf_s(args: argparse.Namespace, profile: Profile | None) -> float | None:
    """Seconds, if a flag or the profile has them; a rate by GPUs precedes the profile."""
    if isinstance(args.mtbf, float | int):
        for name in ('gpus', 'gpu_hours_per_failure'):
            if getattr(args, name) is not None:
                raise FieldError(name, 'is for a job without --mtbf; leave one of them out')
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
