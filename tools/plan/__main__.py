# SPDX-License-Identifier: Apache-2.0
r"""Plans sparse checkpointing for a model on a cluster: its costs and its benefit.

    moevement plan --model deepseek-v3 --cluster h100 --mfu 0.35 --window 1
    moevement plan --model job.json --cluster a100 --iteration-time 2.9 --mtbf 3600 --json
    moevement plan --cluster h100 --gpus 64 --mfu 0.3 -- \
        --num-layers 32 --hidden-size 4096 ...

After `--` follow flags of Megatron and of sparse checkpointing, as for training. See
docs/planning.md.

Exit status: 0 there is a plan, 2 there is none; stderr has the reason.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace
from rich.console import Console

from moevement_ext.config import ConfigurationError
from moevement_ext.plan.byte_planner import InfeasiblePlan

from ..lab.fields import FieldError, Positive, parser_of
from ..lab.figures import print_json
from ..lab.programs import Parser, add_flags, flags_of, split_at_end
from ..model.description import (
    CLUSTERS,
    GIGA,
    GPU_HOURS_PER_FAILURE,
    PRESETS,
    Cluster,
    Training,
    known_or_read,
    mtbf_s,
)
from ..model.layout import PRECISIONS, Format, Precision
from .flags import MegatronFlags, flag, parse_megatron_flags
from .planning import FailureRate, Job, ProtectionSettings, iteration_seconds, plan_job
from .report import as_json, infeasible, print_plan


def job_from(args: argparse.Namespace, megatron: MegatronFlags) -> Job:
    """The job to plan.

    Raises DescriptionError or FieldError (both ValueError); the message names the flag or field.
    """
    base = known_or_read(args.model, Training, PRESETS, '--model') if args.model else None
    cluster = known_or_read(args.cluster, Cluster, CLUSTERS, '--cluster')
    in_giga = _given(args, (name for name in Cluster.__struct_fields__ if '_bytes' in name))
    cluster = replace(cluster, **{name: GIGA * value for name, value in in_giga.items()})
    training = megatron.training(base, args.ranks)
    of = training.model, training.layout, training.batch, cluster
    precision = PRECISIONS[args.precision] if args.precision else training.precision
    settings = _given(args, ProtectionSettings.__struct_fields__)
    return Job(
        *of,
        args.iteration_time or iteration_seconds(*of, args.mfu),
        replace(precision, **_given(args, Precision.__struct_fields__)),
        ProtectionSettings(**megatron.fields('protection') | settings),
        FailureRate(
            args.mtbf or mtbf_s(args.gpu_hours_per_failure, training.layout.ranks),
            args.restart_s,
            args.local_saving,
            args.frozen_saving,
        ),
        args.overhead_s,
    )


def _given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    values = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, MegatronFlags]:
    own, flags = split_at_end(argv)
    parser = Parser(prog='moevement plan', description=__doc__)
    window = ProtectionSettings.__annotations__['window']
    kinds = {'format': parser_of(Format), 'window': parser_of(window), 'gpu_hours': _gpu_hours}
    presets: dict[str, Iterable[str]] = {
        'models': PRESETS,
        'clusters': CLUSTERS,
        'rates': GPU_HOURS_PER_FAILURE,
    }
    words = {name: ', '.join(known) for name, known in presets.items()}
    for title, group in flags_of(__package__).items():
        add_flags(parser.add_argument_group(title), group, kinds, words)
    args = parser.parse_args(own)
    if args.iteration_time is None and args.mfu is None:
        parser.error('give --iteration-time or --mfu')
    try:
        return args, parse_megatron_flags(flags)
    except ConfigurationError as error:
        parser.error(str(error))


def _gpu_hours(text: str) -> float:
    return GPU_HOURS_PER_FAILURE.get(text) or parser_of(Positive)(text)


def _run_job(args: argparse.Namespace, megatron: MegatronFlags, console: Console) -> None:
    plan = plan_job(job_from(args, megatron))
    if args.json:
        print_json(as_json(plan, megatron.unused))
    else:
        print_plan(plan, console, megatron.unused)
    if reason := infeasible(plan):
        raise ValueError(reason)


def main(argv: Sequence[str] | None = None) -> int:
    args, megatron = parse_arguments(argv)
    console, problems = Console(), Console(stderr=True)
    try:
        _run_job(args, megatron, console)
        return 0
    except InfeasiblePlan as error:
        reason = '; '.join([str(error), *getattr(error, '__notes__', ())])
    except FieldError as error:
        own = flag(error.field) if _given(args, [error.field]) else None
        named = own or megatron.named(error.field)
        reason = f'{named} {error.problem}' if named else str(error)
    except (ValueError, ConfigurationError) as error:
        reason = str(error)
    problems.print(f'plan: {reason}', style='bold red', markup=False, soft_wrap=True)
    return 2


if __name__ == '__main__':
    sys.exit(main())
