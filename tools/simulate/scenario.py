# SPDX-License-Identifier: Apache-2.0
"""Common flags of the simulator and its sweeps, and the scenario that they describe."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from moevement_ext.plan.byte_planner import InfeasiblePlan

from ..lab.fields import FieldError, PositiveOrInfinite, parser_of
from ..lab.programs import add_flags, flags_of
from ..model.description import GIGA, DescriptionError, read
from ..model.description import mtbf_s as mtbf_of
from . import profile as profiles
from .experts import draw_shares
from .monte_carlo import Estimate, Pipeline, Process, simulate
from .profile import Profile
from .systems import Options, System, build

_Window = Annotated[int, Meta(ge=1, le=10**6, description='give a whole number from 1 to 1000000')]
_Shape = Annotated[float, Meta(ge=0.1, description='give 0.1 or more')]
_RATES = {f'{link}_bandwidth': f'{link}_bytes_per_s' for link in ('copy', 'network', 'disk')}


@contextmanager
def errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Exit with a message about bad input; a field is named as its flag."""
    try:
        yield
    except FieldError as error:
        parser.error(f'--{error.field.replace("_", "-")} {error.problem}')
    except (InfeasiblePlan, DescriptionError) as error:
        parser.error(str(error))


def add_scenario_flags(parser: argparse.ArgumentParser) -> None:
    kinds = {'window': parser_of(_Window), 'shape': parser_of(_Shape), 'multiple': multiple}
    for title, flags in flags_of(__package__).items():
        add_flags(parser.add_argument_group(title), flags, kinds)


def multiple(text: str) -> tuple[float, bool]:
    """A number above 0, and whether it counts multiples, as in `0.5x`."""
    return parser_of(PositiveOrInfinite)(text.removesuffix('x')), text.endswith('x')


class Scenario(NamedTuple):
    """Everything that the flags describe, except the system."""

    args: argparse.Namespace
    options: Options
    profile: Profile | None
    process: Process

    def system(self, name: str) -> System:
        return build(name, self.options, self.profile)

    def simulate(self, system: System) -> Estimate:
        """Raises FieldError."""
        return simulate(
            system.run or system.costs,
            self.process,
            nodes=self.options.pipeline.nodes if self.options.pipeline else 1,
            hours=self.args.hours,
            seed=self.args.seed,
        )


def scenario(args: argparse.Namespace) -> Scenario:
    """Build the scenario of the flags. Raises FieldError, DescriptionError."""
    profile = _profile(args)
    process = Process(_mtbf_s(args, profile), args.weibull_shape)
    own = {name: getattr(args, name) for name in Options.__struct_fields__ if name in args}
    options = Options(
        mtbf_s=process.mtbf_s,
        pipeline=_pipeline(args, profile),
        shares=_shares(args, profile),
        **own,
    )
    return Scenario(args, options, profile, process)


def _profile(args: argparse.Namespace) -> Profile | None:
    if args.profile is None:
        return None
    rates = {field: getattr(args, name) for name, field in _RATES.items()}
    given = {field: GIGA * rate for field, rate in rates.items() if rate is not None}
    if not args.profile.is_dir():
        return replace(read(args.profile, Profile), **given)
    if args.recovery == 'localized' and args.micro_batches is None:
        raise FieldError('micro_batches', 'is missing; the events of a run do not say it')
    return profiles.derive(args.profile, given)


def _pipeline(args: argparse.Namespace, profile: Profile | None) -> Pipeline:
    base = profile.pipeline if profile else Pipeline()
    names = ('nodes', 'stages', 'micro_batches', 'copies')
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if 'nodes' not in given and base.nodes == 1:
        given['nodes'] = given.get('stages', base.stages) * given.get('copies', base.copies)
    return replace(base, **given)


def _mtbf_s(args: argparse.Namespace, profile: Profile | None) -> float:
    """Seconds of the flags, or of the profile; a rate by GPUs precedes the profile."""
    rate = {name: getattr(args, name) for name in ('gpus', 'gpu_hours_per_failure')}
    given = {name: value for name, value in rate.items() if value is not None}
    measured = profile.mtbf_s if profile else None
    if args.mtbf is not None:
        seconds, multiple = args.mtbf
        for name in () if multiple else given:
            raise FieldError(name, 'is for a job without --mtbf; leave one of them out')
        if multiple and measured is None:
            raise FieldError('mtbf', 'is a multiple, but there is no profile of a run that failed')
        return float(seconds * measured if multiple and measured else seconds)
    if measured is not None and 'gpu_hours_per_failure' not in given:
        return measured
    if len(given) < len(rate):
        raise FieldError('mtbf', 'is missing; give it, or --gpus and --gpu-hours-per-failure')
    return mtbf_of(args.gpu_hours_per_failure, args.gpus)


def _shares(args: argparse.Namespace, profile: Profile | None) -> np.ndarray | None:
    if args.skew is None:
        return None
    known = profile.token_shares() if profile else None
    experts = args.experts or (None if known is None else len(known))
    if experts is None:
        raise FieldError('experts', 'is missing; a skew is over a number of experts')
    return draw_shares(args.skew, experts, args.seed)


def answer(scenario: Scenario, name: str) -> dict[str, object]:
    """Results for one system, by closed formula and by simulation; seconds, bytes, shares.

    `overhead` is a share of an iteration, stalls included. Raises FieldError, InfeasiblePlan.
    """
    system = scenario.system(name)
    costs = system.costs
    found = scenario.simulate(system)
    stall_s = getattr(costs, 'stall_s', None)
    figures = {
        'system': name,
        'iteration_s': costs.iteration_s,
        'window' if stall_s is None else 'interval': costs.period,
        'overhead_s': costs.overhead_s,
        'overhead': costs.mean_overhead_s / costs.iteration_s,
        'stall_s': stall_s,
        'restart_s': costs.restart_s,
        'mtbf_s': costs.mtbf_s,
        **system.found,
        'ettr_first_order': costs.ettr_first_order(),
        'ettr_exact': costs.ettr_exact(),
        'ettr_simulated': found.ettr,
        'ettr_simulated_ci95': list(found.ci95),
        'expected_recovery_s': costs.expected_recovery_s(),
        'simulated_failures': found.failures,
        'simulated_hours': found.hours,
        'simulated_lost_s_per_failure': found.lost_s,
        'simulated_struck_again': found.struck_again,
    }
    return {key: value for key, value in figures.items() if value is not None}
