# SPDX-License-Identifier: Apache-2.0
r"""Plans sparse checkpointing for a model on a cluster: what it costs and what it saves.

    python -m tools.plan --model deepseek-v3 --cluster h100 --mfu 0.35 --window 1
    python -m tools.plan --model job.json --cluster a100 --iteration-time 2.9 --mtbf 3600 --json
    python -m tools.plan --cluster h100 --gpus 64 --mfu 0.3 -- \
        --num-layers 32 --hidden-size 4096 ...
    python -m tools.plan --operators operators.json --budget-bytes 4e9 --json

After `--` come flags of Megatron and of sparse checkpointing, as the training takes them. With
--operators, only a list of operators is cut into slots. See docs/planning.md.

Exit status: 0 there is a plan, 2 there is none; the reason is on stderr.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from moevement_ext.memory.budget import gib
from moevement_ext.plan.algorithm1 import plan_as_printed
from moevement_ext.plan.byte_planner import (
    InfeasiblePlan,
    OperatorBytes,
    WindowPlan,
    bytes_over_budget,
    fewest_slots,
)
from tools.lab.arguments import Parser
from tools.plan import advice
from tools.plan.cluster import (
    CLUSTERS,
    GIGA,
    GPU_HOURS_PER_FAILURE,
    Cluster,
    mtbf_s,
)
from tools.plan.description import (
    DescriptionError,
    Training,
    read_as,
    read_operators,
    read_training,
)
from tools.plan.flags import RECOVERIES, MegatronFlags, parse_megatron_flags
from tools.plan.layout import PRECISIONS
from tools.plan.planning import (
    FailureRate,
    Job,
    ProtectionSettings,
    iteration_seconds,
    plan_job,
)
from tools.plan.presets import PRESETS
from tools.plan.report import as_json, print_plan
from tools.simulate.fields import FieldError

PRINTED = 'paper'
BY_BYTES = 'bytes'
_FORMATS = 'compute', 'master', 'first_moment', 'second_moment'
_DEFAULT_FAILURES = 'projection-131k'
_FLAG_OF_FIELD = {
    'ranks': 'gpus', 'overhead_s': 'overhead', 'restart_s': 'restart_time',
    'copy_bytes_per_s': 'copy_bandwidth', 'network_bytes_per_s': 'network_bandwidth',
    'host_memory_bytes': 'host_memory', 'gpu_memory_bytes': 'gpu_memory',
}  # fmt: skip
"""Destination of the flag, where it is not the field's name."""


def plan_operators(operators: Sequence[OperatorBytes], budget: int, algorithm: str) -> WindowPlan:
    """Cut a list of operators into slots.

    Raises InfeasiblePlan (algorithm `bytes`) if one operator alone exceeds the budget; ValueError
    for a budget below 1 or names that occur twice.
    """
    if algorithm == PRINTED:
        return plan_as_printed(operators, budget)
    return fewest_slots(operators, budget)


def job_from(args: argparse.Namespace, megatron: MegatronFlags) -> Job:
    """What is to be planned.

    Raises DescriptionError or FieldError (both ValueError), which name the flag or field.
    """
    base = _training(args.model) if args.model else None
    training = megatron.training(base, args.gpus)
    cluster = _cluster(args)
    precision = PRECISIONS[args.precision] if args.precision else training.precision
    precision = dataclasses.replace(
        precision, **_given({name: getattr(args, name) for name in _FORMATS})
    )
    iteration_s = args.iteration_time or iteration_seconds(
        training.model, training.layout, training.batch, cluster, args.mfu
    )
    gpus = training.layout.ranks
    failures = FailureRate(
        args.mtbf or mtbf_s(args.gpu_hours_per_failure, gpus),
        args.restart_time,
        args.local_saving,
        args.frozen_saving,
    )
    return Job(
        training.model,
        training.layout,
        training.batch,
        cluster,
        iteration_s,
        precision,
        _protection(args, megatron),
        failures,
        args.overhead,
    )


def print_slots(plan: WindowPlan, operators: Sequence[OperatorBytes], console: Console) -> None:
    """For people."""
    table = Table(title=f'Window of {plan.window}')
    for column in ('slot', 'bytes', 'captured in full'):
        table.add_column(column)
    for index, (names, size) in enumerate(zip(plan.slots, _sizes(plan, operators), strict=True)):
        table.add_row(str(index), gib(size), ' '.join(names))
    console.print(table)


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, MegatronFlags]:
    """The flags, checked; exits with a message if they are wrong."""
    given = list(sys.argv[1:] if argv is None else argv)
    cut = given.index('--') if '--' in given else len(given)
    parser = Parser(prog='python -m tools.plan', description=__doc__)
    _add_operator_flags(parser)
    _add_job_flags(parser)
    _add_protection_flags(parser)
    _add_failure_flags(parser)
    args = parser.parse_args(given[:cut])
    if args.operators and args.budget_bytes is None:
        parser.error('--budget-bytes is missing: --operators needs the bytes a slot may hold')
    if not args.operators:
        if args.iteration_time is None and args.mfu is None:
            parser.error('give --iteration-time or --mfu (or --operators with --budget-bytes)')
        if args.algorithm != BY_BYTES:
            parser.error('--algorithm is for --operators; a whole plan shows both')
    return args, parse_megatron_flags(given[cut + 1 :])


def _add_operator_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('a list of operators')
    group.add_argument(
        '--operators',
        type=Path,
        metavar='FILE',
        help='JSON list of {"name", "full_bytes", "light_bytes"} in capture order',
    )
    group.add_argument('--budget-bytes', type=_bytes, metavar='B', help='that a slot may hold')
    group.add_argument(
        '--algorithm',
        choices=(BY_BYTES, PRINTED),
        default=BY_BYTES,
        help="'paper': Algorithm 1 as printed, which may exceed the budget (default: bytes)",
    )
    parser.add_argument('--json', action='store_true', help='print JSON')


def _add_job_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('a whole job')
    group.add_argument(
        '--model',
        metavar='NAME|FILE',
        help=f'with a layout; a file (JSON, YAML) or one of {", ".join(PRESETS)}',
    )
    group.add_argument(
        '--cluster',
        metavar='NAME|FILE',
        default='h100',
        help=f'a file or one of {", ".join(CLUSTERS)} (default: h100)',
    )
    group.add_argument('--gpus', type=_count, help='of the job (default: as the model says)')
    time = group.add_mutually_exclusive_group()
    time.add_argument('--iteration-time', type=_positive, metavar='S', help='seconds')
    time.add_argument('--mfu', type=_positive, help='model FLOPs utilization, to compute it from')
    group.add_argument(
        '--precision', choices=PRECISIONS, help='formats of the state; c1 to c5: of the paper'
    )
    for name in _FORMATS:
        flag = f'--{name.replace("_", "-")}'
        group.add_argument(flag, metavar='FORMAT', help='fp8, fp16, bf16 or fp32')
    for name in ('copy-bandwidth', 'network-bandwidth', 'host-memory', 'gpu-memory'):
        unit = 'GB/s' if name.endswith('bandwidth') else 'GB'
        whose = 'GPU' if name in ('copy-bandwidth', 'gpu-memory') else 'node'
        group.add_argument(
            f'--{name}', type=_positive, metavar=unit, help=f"of a {whose}, not the cluster's"
        )


def _add_protection_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('sparse checkpointing (defaults are those of the training)')
    group.add_argument('--window', help='iterations, or auto: the fewest that fit')
    group.add_argument('--max-window', type=int, help='the longest of auto')
    group.add_argument('--replicas', type=int, help='copies on other nodes')
    group.add_argument('--recovery', choices=RECOVERIES)
    group.add_argument(
        '--disk', action='store_const', const=True, help='windows are copied to disk'
    )
    group.add_argument('--hidden-fraction', type=float, help='of an iteration that hides a copy')
    group.add_argument('--network-share', type=float, help='of a node for replication')
    group.add_argument(
        '--log-lag',
        type=float,
        metavar='ITERATIONS',
        help="that persisting a window takes (default: by the cluster's rates)",
    )
    group.add_argument(
        '--overhead',
        type=float,
        default=0.0,
        metavar='S',
        help='measured seconds an iteration, besides exposed copies (default: 0)',
    )


def _add_failure_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('failures')
    rate = group.add_mutually_exclusive_group()
    rate.add_argument('--mtbf', type=_positive, metavar='S', help='seconds between failures')
    rate.add_argument(
        '--gpu-hours-per-failure',
        type=_gpu_hours,
        metavar='H',
        default=GPU_HOURS_PER_FAILURE[_DEFAULT_FAILURES],
        help=f'a number or one of {", ".join(GPU_HOURS_PER_FAILURE)} '
        f'(default: {_DEFAULT_FAILURES})',
    )
    group.add_argument(
        '--restart-time',
        type=float,
        default=FailureRate.restart_s,
        metavar='S',
        help='from a failure until the replay begins (default: %(default)s)',
    )
    for name, why in (('local', 'only lost stages compute'), ('frozen', 'operators are frozen')):
        group.add_argument(
            f'--{name}-saving',
            type=float,
            default=0.0,
            metavar='SHARE',
            help=f'of work in a replay, as {why} (default: 0)',
        )


def _training(name: str) -> Training:
    if name in PRESETS:
        preset = PRESETS[name]
        return Training(preset.model, preset.layout, preset.batch)
    return read_training(_file('--model', name, PRESETS))


def _cluster(args: argparse.Namespace) -> Cluster:
    name = args.cluster
    cluster = CLUSTERS.get(name) or read_as(_file('--cluster', name, CLUSTERS), Cluster)
    changes = {
        'copy_bytes_per_s': args.copy_bandwidth,
        'network_bytes_per_s': args.network_bandwidth,
        'host_memory_bytes': args.host_memory,
        'gpu_memory_bytes': args.gpu_memory,
    }
    return dataclasses.replace(
        cluster, **{field: GIGA * value for field, value in _given(changes).items()}
    )


def _file(flag: str, name: str, presets: Any) -> Path:
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
        localized=recovery == 'localized',
        disk=settings.pop('disk', None) is not None,
        **settings,
    )


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _sizes(plan: WindowPlan, operators: Sequence[OperatorBytes]) -> list[int]:
    """Bytes of each slot on the only rank."""
    return [sum(sizes) for sizes in plan.slot_bytes(operators)]


def _bytes(text: str) -> int:
    value = float(text)
    if not value.is_integer() or value < 1:
        raise argparse.ArgumentTypeError(f'{text}: give a whole number of bytes, 1 or more')
    return int(text) if text.isdecimal() else int(value)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f'{text}: give a number above 0')
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text}: give a whole number, 1 or more')
    return int(text)


def _gpu_hours(text: str) -> float:
    return GPU_HOURS_PER_FAILURE.get(text) or _positive(text)


def _run_operators(args: argparse.Namespace, console: Console, problems: Console) -> int:
    operators = read_operators(args.operators)
    plan = plan_operators(operators, args.budget_bytes, args.algorithm)
    over = bytes_over_budget(plan, operators, args.budget_bytes)
    if over:
        text = f'plan: the largest slot exceeds the budget by {over} bytes'
        problems.print(text, markup=False, highlight=False, soft_wrap=True)
    if args.json:
        sizes = _sizes(plan, operators)
        _print_json({'window': plan.window, 'slots': plan.slots, 'slot_bytes': sizes})
    else:
        print_slots(plan, operators, console)
    return 0


def _run_job(args: argparse.Namespace, megatron: MegatronFlags, console: Console) -> int:
    plan = plan_job(job_from(args, megatron))
    if args.json:
        _print_json(as_json(plan, megatron.unused))
    else:
        print_plan(plan, console, megatron.unused)
    reason = advice.infeasible(plan)
    if reason:
        raise ValueError(reason)
    return 0


def _flag_error(error: FieldError, args: argparse.Namespace, megatron: MegatronFlags) -> str:
    """The message, with the flag that was given in the field's place."""
    name = _FLAG_OF_FIELD.get(error.field, error.field)
    own = None if getattr(args, name, None) is None else '--' + name.replace('_', '-')
    flag = own or megatron.named(error.field)
    return str(error) if flag is None else f'{flag} {error.problem}'


def _print_json(content: dict[str, Any]) -> None:
    print(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
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
    except ValueError as error:
        reason = str(error)
    problems.print(f'plan: {reason}', style='bold red', markup=False, soft_wrap=True)
    return 2


if __name__ == '__main__':
    sys.exit(main())
