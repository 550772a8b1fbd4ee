# SPDX-License-Identifier: Apache-2.0
r"""Plans sparse checkpointing for a model on a cluster: its costs and its benefit.

    moevement plan --model deepseek-v3 --cluster h100 --mfu 0.35 --window 1
    moevement plan --model job.json --cluster a100 --iteration-time 2.9 --mtbf 3600 --json
    moevement plan --cluster h100 --gpus 64 --mfu 0.3 -- \
        --num-layers 32 --hidden-size 4096 ...
    moevement plan --operators operators.json --budget-bytes 4e9 --json

After `--` follow flags of Megatron and of sparse checkpointing, as for training. With --operators
the tool only divides a list of operators into slots. See docs/planning.md.

Exit status: 0 there is a plan, 2 there is none; stderr has the reason.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich.console import Console

from moevement_ext.config import AUTO, ConfigurationError
from moevement_ext.memory.file_system import gib
from moevement_ext.plan.byte_planner import (
    InfeasiblePlan,
    OperatorTable,
    WindowPlan,
    bytes_over_budget,
    fewest_slots,
)

from ..lab.arguments import Parser, above_0, at_least, split_at_end
from ..lab.figures import print_json
from ..lab.tables import table
from ..model.algorithm1 import plan_as_printed
from ..model.command import add_groups, flags_of_fields, read_flags, value_of
from ..model.description import (
    CLUSTERS,
    GIGA,
    GPU_HOURS_PER_FAILURE,
    PRESETS,
    Cluster,
    DescriptionError,
    Training,
    mtbf_s,
    read,
    read_operators,
)
from ..model.fields import FieldError
from ..model.layout import PRECISIONS
from .flags import MegatronFlags, parse_megatron_flags
from .planning import (
    FailureRate,
    Job,
    ProtectionSettings,
    iteration_seconds,
    plan_job,
)
from .report import as_json, infeasible, print_plan

PRINTED = 'paper'
_FORMATS = 'compute', 'master', 'first_moment', 'second_moment'
assert __package__
_GROUPS = read_flags(__package__)
_FLAG_OF_FIELD = flags_of_fields(_GROUPS)
_IN_GIGA = 'copy_bytes_per_s network_bytes_per_s host_memory_bytes gpu_memory_bytes'.split()


def job_from(args: argparse.Namespace, megatron: MegatronFlags) -> Job:
    """The job to plan.

    Raises DescriptionError or FieldError (both ValueError); the message names the flag or field.
    """
    training = megatron.training(_training(args.model) if args.model else None, args.gpus)
    of = training.model, training.layout, training.batch, _cluster(args)
    precision = PRECISIONS[args.precision] if args.precision else training.precision
    formats = _given({name: getattr(args, name) for name in _FORMATS})
    failures = FailureRate(
        args.mtbf or mtbf_s(args.gpu_hours_per_failure, training.layout.ranks),
        args.restart_time,
        args.local_saving,
        args.frozen_saving,
    )
    return Job(
        *of,
        args.iteration_time or iteration_seconds(*of, args.mfu),
        replace(precision, **formats),
        _protection(args, megatron),
        failures,
        args.overhead,
    )


def print_slots(plan: WindowPlan, operators: OperatorTable, console: Console) -> None:
    slots = zip(plan.slots, _sizes(plan, operators), strict=True)
    rows = [(str(index), gib(size), ' '.join(names)) for index, (names, size) in enumerate(slots)]
    columns = 'slot', 'bytes', 'captured in full'
    console.print(table(columns, rows, title=f'Window of {plan.window}'))


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, MegatronFlags]:
    own, flags = split_at_end(argv)
    parser = Parser(prog='moevement plan', description=__doc__)
    kinds = {'int': int, 'float': float, 'path': Path, 'bytes': _bytes, 'whole': at_least(1),
             'above_0': above_0, 'gpu_hours': _gpu_hours}  # fmt: skip
    presets: dict[str, Iterable[str]] = {
        'models': PRESETS,
        'clusters': CLUSTERS,
        'rates': GPU_HOURS_PER_FAILURE,
    }
    words = {name: ', '.join(known) for name, known in presets.items()}
    add_groups(parser, _GROUPS, kinds, **words)
    args = parser.parse_args(own)
    if args.operators and args.budget_bytes is None:
        parser.error('--budget-bytes is missing: --operators needs the bytes a slot may hold')
    if not args.operators:
        if args.iteration_time is None and args.mfu is None:
            parser.error('give --iteration-time or --mfu (or --operators with --budget-bytes)')
        if args.algorithm == PRINTED:
            parser.error('--algorithm is for --operators; a whole plan shows both')
    return args, parse_megatron_flags(flags)


def _training(name: str) -> Training:
    return PRESETS.get(name) or read(_file('--model', name, PRESETS), Training)


def _cluster(args: argparse.Namespace) -> Cluster:
    name = args.cluster
    cluster = CLUSTERS.get(name) or read(_file('--cluster', name, CLUSTERS), Cluster)
    changes = _given({field: value_of(args, field, _FLAG_OF_FIELD) for field in _IN_GIGA})
    return replace(cluster, **{name: GIGA * value for name, value in changes.items()})


def _file(flag: str, name: str, presets: Iterable[str]) -> Path:
    path = Path(name)
    if not path.exists():
        raise DescriptionError(f'{flag} {name}: no such file, nor one of {", ".join(presets)}')
    return path


def _protection(args: argparse.Namespace, megatron: MegatronFlags) -> ProtectionSettings:
    names = 'window max_window replicas recovery hidden_fraction network_share log_lag disk'
    own = {name: getattr(args, name) for name in names.split()}
    settings = {**megatron.protection(), **_given(own)}
    recovery = settings.pop('recovery', 'localized')
    window = settings.pop('window', 'auto')
    if window != 'auto' and not window.isdecimal():
        raise DescriptionError(f'--window {window}: give a whole number or auto')
    return ProtectionSettings(
        window=None if window == 'auto' else int(window),
        localized=recovery in (AUTO, 'localized'),
        disk=settings.pop('disk', None) is not None,
        **settings,
    )


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _sizes(plan: WindowPlan, operators: OperatorTable) -> list[int]:
    """Bytes of each slot, on the only rank."""
    return plan.slot_bytes(operators)[:, 0].tolist()


def _bytes(text: str) -> int:
    value = float(text)
    if not value.is_integer() or value < 1:
        raise argparse.ArgumentTypeError(f'{text}: give a whole number of bytes, 1 or more')
    return int(text) if text.isdecimal() else int(value)


def _gpu_hours(text: str) -> float:
    return GPU_HOURS_PER_FAILURE.get(text) or above_0(text)


def _run_operators(args: argparse.Namespace, console: Console, problems: Console) -> int:
    operators = read_operators(args.operators)
    planner = plan_as_printed if args.algorithm == PRINTED else fewest_slots
    plan = planner(operators, args.budget_bytes)
    over = bytes_over_budget(plan, operators, args.budget_bytes)
    if over:
        text = f'plan: the largest slot exceeds the budget by {over} bytes'
        problems.print(text, markup=False, highlight=False, soft_wrap=True)
    if args.json:
        sizes = _sizes(plan, operators)
        print_json({'window': plan.window, 'slots': plan.slots, 'slot_bytes': sizes})
    else:
        print_slots(plan, operators, console)
    return 0


def _run_job(args: argparse.Namespace, megatron: MegatronFlags, console: Console) -> int:
    job = job_from(args, megatron)
    plan = plan_job(job)
    if args.json:
        print_json(as_json(plan, megatron.unused))
    else:
        print_plan(plan, console, megatron.unused)
    reason = infeasible(plan)
    if reason:
        raise ValueError(reason)
    return 0


def _flag_error(error: FieldError, args: argparse.Namespace, megatron: MegatronFlags) -> str:
    """The error's message, with the user's flag in place of the field."""
    own = _FLAG_OF_FIELD.get(error.field, '--' + error.field.replace('_', '-'))
    is_given = value_of(args, error.field, _FLAG_OF_FIELD) is not None
    flag = own if is_given else megatron.named(error.field)
    return str(error) if flag is None else f'{flag} {error.problem}'


def main(argv: Sequence[str] | None = None) -> int:
    args, megatron = parse_arguments(argv)
    console, problems = Console(), Console(stderr=True)
    try:
        if args.operators:
            return _run_operators(args, console, problems)
        return _run_job(args, megatron, console)
    except InfeasiblePlan as error:
        reason = '; '.join([str(error), *getattr(error, '__notes__', ())])
    except FieldError as error:
        reason = _flag_error(error, args, megatron)
    except (ValueError, ConfigurationError) as error:
        reason = str(error)
    problems.print(f'plan: {reason}', style='bold red', markup=False, soft_wrap=True)
    return 2


if __name__ == '__main__':
    sys.exit(main())
