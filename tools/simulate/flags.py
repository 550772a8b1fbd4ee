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

from ..model import fields
from ..model.command import add_groups, flags_of_fields, read_flags, value_of
from ..model.description import GIGA, DescriptionError, read
from ..model.description import mtbf_s as mtbf_of
from ..model.fields import FieldError, NotNegative, Positive
from . import profile as profiles
from .experts import draw_shares
from .failures import Correlated, Process, Renewal, Trace, TraceError, read_trace
from .monte_carlo import Estimate, Spares, simulate
from .profile import Profile
from .runs import Pipeline
from .systems import PARTIAL_SYSTEMS, Options, System, build

assert __package__
_GROUPS = read_flags(__package__)
FLAG_OF_FIELD = flags_of_fields(_GROUPS)
# Fields of Options that have a flag each.
_GIVEN = (
    'iteration_s interval window overhead_s stall_s restart_s local_saving frozen_saving copy_s '
    'interval_rule overhead_bound experts saved selection lost_budget'
).split()
_RATES = 'copy_bytes_per_s', 'network_bytes_per_s', 'disk_bytes_per_s'


class Times(NamedTuple):
    """A multiple of the profile's value."""

    factor: float


def mtbf(text: str) -> float | Times:
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


def add_scenario_flags(parser: argparse.ArgumentParser) -> None:
    add_groups(parser, _GROUPS, {'int': int, 'float': float, 'path': Path, 'mtbf': mtbf})
    parser.add_argument('--json', action='store_true', help='print JSON instead of a table')


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
    options = Options(
        **{name: value_of(args, name, FLAG_OF_FIELD) for name in _GIVEN},
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


def _profile(args: argparse.Namespace) -> Profile | None:
    if args.profile is None:
        return None
    rates = {name: value_of(args, name, FLAG_OF_FIELD) for name in _RATES}
    given = {name: GIGA * rate for name, rate in rates.items() if rate is not None}
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
