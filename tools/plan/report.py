# SPDX-License-Identifier: Apache-2.0
"""A plan as a table for people and as JSON for programs, with reasons and warnings.

The reasons say why a plan cannot work; the warnings name costs that a user might overlook. Their
texts are in `report.toml`.
"""

import string
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from rich.console import Console

from moevement_ext.memory.file_system import GIB, gib

from ..lab.tables import say, table
from .planning import JobPlan, StageKind

_TEXTS: dict[str, Any] = tomllib.loads(
    files(__package__).joinpath('report.toml').read_text('utf-8')
)
# Megatron's main gradients are fp32.
_GRADIENT_BYTES = 4


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == 'gib':
            return gib(int(value))
        if format_spec.startswith('e9'):
            return format(value / 1e9, format_spec[2:])
        return str(format(value, format_spec))


_format = _Formatter().vformat


def figures(plan: JobPlan) -> dict[str, Any]:
    """All numbers of a plan; bytes, seconds and shares."""
    job, effect = plan.job, plan.effectiveness()
    exposed, memory = plan.exposed_s(), plan.host_memory()
    return {
        'model': job.model.name,
        'total_parameters': job.model.total_parameters,
        'active_parameters': job.model.active_parameters,
        'cluster': job.cluster.name,
        'gpus': job.layout.ranks,
        'nodes': job.nodes,
        'iteration_s': job.iteration_s,
        'window': plan.window,
        'fewest_slots': plan.fewest,
        'longest_window': plan.longest,
        'copy_budget_bytes': plan.budgets.copy_bytes,
        'network_budget_bytes': plan.budgets.network_bytes,
        'limited_by': plan.limited_by,
        'stages': [_stage(kind) for kind in plan.kinds],
        'exposed_s_mean': float(exposed.mean()),
        'exposed_s_worst': float(exposed.max()),
        'overhead_s': effect.overhead_s,
        'replicas': job.copies,
        'replication_bytes_per_node': plan.replicated_bytes(),
        'replication_budget_bytes_per_node': plan.network_bytes(),
        'replication_queue_bytes': plan.queue_bytes(),
        'log_bytes_per_node': plan.log_bytes_of_node(),
        'host_memory_bytes_per_node': {**memory.by_kind(), 'total': memory.node_total},
        'host_memory_taken_bytes_per_node': plan.taken_bytes(),
        'host_memory_available_bytes': job.cluster.host_memory_bytes,
        'mtbf_s': effect.mtbf_s,
        'restart_s': effect.restart_s,
        'expected_recovery_s': effect.expected_recovery_s(),
        'worst_recovery_s': effect.worst_recovery_s(),
        'ettr_first_order': effect.ettr_first_order(),
        'ettr_exact': effect.ettr_exact(),
        'algorithm_1': {'window': plan.printed_window, 'bytes_over_budget': plan.printed_over},
    }


def as_json(plan: JobPlan, unused_flags: list[str]) -> dict[str, Any]:
    """All results of a plan."""
    texts = {'warnings': warnings(plan), 'infeasible': infeasible(plan)}
    return {**figures(plan), **texts, 'unused_flags': unused_flags}


def _stage(kind: StageKind) -> dict[str, Any]:
    full, weights = kind.rank_bytes()
    return {
        'stages': kind.stages,
        'operators': len(kind.operators),
        'full_bytes_per_rank': full,
        'weight_bytes_per_rank': weights,
        'log_bytes_per_rank': kind.logged.iteration_bytes,
        'slots': [list(slot) for slot in kind.plan.slots],
        'slot_bytes': kind.slot_bytes().max(axis=1).tolist(),
    }


def print_plan(plan: JobPlan, console: Console, unused_flags: list[str]) -> None:
    known = _fields(plan)
    say(console, _format(_TEXTS['head'], (), known))
    columns = 'stages', '>operators', '>full', '>weights', '>operators of slots', '>GiB of slots'
    title = f'Window of {plan.window}; bytes of the largest rank of a stage'
    console.print(table(columns, map(_stage_row, known['stages']), title=title))
    rows = [(name, _format(text, (), known)) for name, text in _TEXTS['rows'].items()]
    console.print(table(('', ''), rows, show_header=False))
    for text in warnings(plan):
        say(console, f'Warning: {text}.')
    if unused_flags:
        say(console, _TEXTS['unused'].format(flags=' '.join(unused_flags)))


def _stage_row(stage: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _ranges(stage['stages']),
        str(stage['operators']),
        gib(stage['full_bytes_per_rank']),
        gib(stage['weight_bytes_per_rank']),
        ' '.join(str(len(slot)) for slot in stage['slots']),
        ' '.join(f'{size / GIB:.2f}' for size in stage['slot_bytes']),
    )


def _ranges(numbers: list[int]) -> str:
    """Format numbers as ranges: `0-3 5` for [0, 1, 2, 3, 5]."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ' '.join(str(p[0]) if len(p) == 1 else f'{p[0]}-{p[-1]}' for p in parts)


def _fields(plan: JobPlan) -> dict[str, Any]:
    """The figures, and what else the texts need."""
    found, settings = figures(plan), plan.job.protection
    kinds, network = plan.host_memory().by_kind(), 'no replicas'
    if plan.budgets.network_bytes is not None:
        network = (
            f'{gib(plan.budgets.network_bytes)} to each holder, on average over a window; at most '
            f'{gib(plan.queue_bytes())} wait in its file'
        )
    fewest, by_copy = plan.fewest, plan.fewest_by_copy
    longer = 'find host memory' if _short_of_room(plan) else 'set a longer --sparse-ckpt-window'
    ranks = range(plan.job.ranks_per_node)
    return found | {
        'network': network,
        'kinds': ', '.join(f'{name.replace("_", " ")} {gib(n)}' for name, n in kinds.items()),
        'fewest_by_copy': by_copy,
        'carried': f'a window of {fewest}' if fewest else 'no window of a sensible length',
        'longer': longer,
        'hides': f'a window of {by_copy} hides it' if by_copy else 'no window hides it',
        'allowed': settings.longest_window,
        'enough': plan.host_memory(plan.window).node_total,
        'stages_of_node': len({plan.job.layout.stage_of(rank) for rank in ranks}),
        'state_bytes': _state_bytes(plan),
        'gpu_memory_bytes': plan.job.cluster.gpu_memory_bytes,
    }


def _short_of_room(plan: JobPlan) -> bool:
    return plan.longest < plan.job.protection.longest_window


def _state_bytes(plan: JobPlan) -> float:
    """Bytes of weights, gradients and optimizer state on the largest rank."""
    precision = plan.job.precision
    of_full = precision.optimizer_bytes / precision.full_bytes
    return max(
        kind.held_parameters * (precision.weight_bytes + _GRADIENT_BYTES)
        + kind.rank_bytes()[0] * of_full
        for kind in plan.kinds
    )


# ---- reasons and warnings


def infeasible(plan: JobPlan) -> str | None:
    """Reason why training would refuse the plan, with a remedy; None if training accepts it."""
    available = plan.job.cluster.host_memory_bytes
    needed = plan.host_memory()
    if needed.node_total <= available:
        return None
    remedies = ['hold fewer replicas', 'use more nodes']
    if needed.by_kind()['log_ring']:
        remedies.insert(0, 'do without logs (recovery of the whole job)')
    if plan.longest > 1:
        less = plan.host_memory(1).node_total
        remedies.insert(0, f'take a shorter window ({gib(less)} with 1)')
    known = {'described': needed.describe(), 'remedies': ' or '.join(remedies)}
    return _format(_TEXTS['infeasible'], (), {**known, 'host_memory_available_bytes': available})


def warnings(plan: JobPlan) -> list[str]:
    """Warnings of one or two sentences, with numbers and remedies."""
    job, known = plan.job, _fields(plan)
    fixed, several = job.protection.fixed_window, job.nodes > 1
    precision, fewest = job.precision, plan.fewest
    narrow = precision.compute == 'fp8' and precision.master != 'fp32'
    holds = {
        'too_long': fixed is not None and fewest is not None and fixed > fewest,
        'limited': plan.limited_by == 'network',
        'skipped': plan.replicated_bytes() > plan.network_bytes(),
        'not_carried': fixed is None and fewest != plan.window,
        'exposed': known['exposed_s_worst'] > 0,
        'no_room': _short_of_room(plan),
        'reserved': plan.window < plan.longest,
        'one_node': not several,
        'few_nodes': several and job.copies < job.protection.replicas,
        'no_replicas': several and job.protection.replicas == 0,
        'stages_of_node': several and known['stages_of_node'] > 1,
        'long_recovery': known['worst_recovery_s'] > job.failures.mtbf_s / 10,
        'fp8_recipe': narrow and not precision.amax_history,
        'fp8_masters': precision.master == 'fp8',
        'gpu_memory': known['state_bytes'] > known['gpu_memory_bytes'],
    }
    texts = _TEXTS['warnings'].items()
    return [_format(text, (), known) for name, text in texts if holds[name]]
