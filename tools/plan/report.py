# SPDX-License-Identifier: Apache-2.0
"""A plan as a table for people and as JSON for programs."""

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from moevement_ext.memory.budget import GIB, gib
from tools.plan import advice
from tools.plan.planning import JobPlan, StageKind


def as_json(plan: JobPlan, unused_flags: list[str]) -> dict[str, Any]:
    """Everything a plan says; bytes, seconds and shares."""
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
        'stages': [_stage_json(kind) for kind in plan.kinds],
        'exposed_s_mean': float(exposed.mean()),
        'exposed_s_worst': float(exposed.max()),
        'overhead_s': effect.overhead_s,
        'replicas': job.copies,
        'replication_bytes_per_node': plan.replicated_bytes(),
        'replication_budget_bytes_per_node': plan.network_bytes(),
        'replication_queue_bytes': plan.queue_bytes(),
        'log_bytes_per_node': plan.log_bytes_of_node(),
        'persist_s': plan.persist_s(),
        'log_lag': plan.log_lag(),
        'host_memory_bytes_per_node': {**memory.by_kind(), 'total': memory.node_total},
        'host_memory_taken_bytes_per_node': plan.taken_bytes(),
        'host_memory_available_bytes': job.cluster.host_memory_bytes,
        'mtbf_s': effect.mtbf_s,
        'restart_s': effect.restart_s,
        'expected_recovery_s': effect.expected_recovery_s(),
        'worst_recovery_s': effect.recovery_range_s()[1],
        'ettr_first_order': effect.ettr_first_order(),
        'ettr_exact': effect.ettr_exact(),
        'algorithm_1': {
            'window': plan.paper.window,
            'bytes_over_budget': plan.paper.bytes_over_budget,
        },
        'warnings': advice.warnings(plan),
        'infeasible': advice.infeasible(plan),
        'unused_flags': unused_flags,
    }


def _stage_json(kind: StageKind) -> dict[str, Any]:
    full, light = _rank_bytes(kind)
    return {
        'stages': kind.stages,
        'operators': len(kind.operators),
        'full_bytes_per_rank': int(full.max()),
        'light_bytes_per_rank': int(light.max()),
        'log_bytes_per_rank': kind.logged.iteration_bytes,
        'slots': [list(slot) for slot in kind.plan.slots],
        'slot_bytes': kind.slot_bytes().max(axis=1).tolist(),
    }


def print_plan(plan: JobPlan, console: Console, unused_flags: list[str]) -> None:
    """For people."""
    job = plan.job
    _say(
        console,
        f'{job.model.name}: {job.model.total_parameters / 1e9:.1f}e9 parameters, '
        f'{job.model.active_parameters / 1e9:.1f}e9 active, on {job.layout.ranks} GPUs of '
        f'{job.nodes} nodes ({job.cluster.name}), {job.iteration_s:.2f} s per iteration',
    )
    console.print(_stage_table(plan))
    console.print(_result_table(plan))
    for text in advice.warnings(plan):
        _say(console, f'Warning: {text}.')
    if unused_flags:
        _say(console, f'Not part of a plan: {" ".join(unused_flags)}')


def _stage_table(plan: JobPlan) -> Table:
    table = Table(title=f'Window of {plan.window}; bytes of the largest rank of a stage')
    for column in ('stages', 'operators', 'full', 'light', 'operators of slots', 'GiB of slots'):
        table.add_column(column, justify='left' if column == 'stages' else 'right')
    for kind in plan.kinds:
        full, light = _rank_bytes(kind)
        table.add_row(
            _ranges(kind.stages),
            str(len(kind.operators)),
            gib(int(full.max())),
            gib(int(light.max())),
            ' '.join(str(len(slot)) for slot in kind.plan.slots),
            ' '.join(f'{size / GIB:.2f}' for size in kind.slot_bytes().max(axis=1).tolist()),
        )
    return table


def _result_table(plan: JobPlan) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column()
    for row in [*_cost_rows(plan), *_recovery_rows(plan)]:
        table.add_row(*row)
    return table


def _cost_rows(plan: JobPlan) -> list[tuple[str, str]]:
    job, budgets, exposed = plan.job, plan.budgets, plan.exposed_s()
    network = 'no replicas'
    if budgets.network_bytes is not None:
        network = (
            f'{gib(budgets.network_bytes)} to each holder, on average over a window; at most '
            f'{gib(plan.queue_bytes())} wait in its file'
        )
    memory = plan.host_memory()
    kinds = ', '.join(f'{name.replace("_", " ")} {gib(n)}' for name, n in memory.by_kind().items())
    over = plan.paper.bytes_over_budget
    return [
        ('budget per rank and iteration', f'copy {gib(budgets.copy_bytes)} a slot; network '
                                          f'{network}'),
        ('exposed per iteration', f'{exposed.mean():.4f} s, worst {exposed.max():.4f} s'),
        ('replication per node and iteration', f'{plan.replicated_bytes() / 1e9:.2f} GB in '
         f'{job.copies} copies; the network share offers {plan.network_bytes() / 1e9:.2f} GB'),
        ('log per node and iteration', gib(plan.log_bytes_of_node())),
        ('persisting a window takes', f'{plan.persist_s():.2f} s; the log is for '
                                      f'--sparse-ckpt-log-lag {plan.log_lag():g}'),
        ('host memory per node', f'{gib(memory.node_total)} of '
                                 f'{gib(int(job.cluster.host_memory_bytes))}: {kinds}'),
        ("the paper's Algorithm 1", f'window {plan.paper.window}, ' + (
            f'{gib(over)} over budget' if over else 'within budget')),
    ]  # fmt: skip


def _recovery_rows(plan: JobPlan) -> list[tuple[str, str]]:
    effect = plan.effectiveness()
    return [
        ('recovery', f'{effect.expected_recovery_s():.1f} s on average, at most '
         f'{effect.recovery_range_s()[1]:.1f} s, {effect.restart_s:g} s of them restart'),
        ('time between failures', f'{effect.mtbf_s:.0f} s ({effect.mtbf_s / 3600:.2f} h)'),
        ('expected ETTR', f'{effect.ettr_exact():.4f} (first order: '
                          f'{effect.ettr_first_order():.4f})'),
    ]  # fmt: skip


def _rank_bytes(kind: StageKind) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of each rank of the stage, all in full and all light, int64 (ranks,)."""
    full = np.sum([operator.full for operator in kind.operators], axis=0)
    light = np.sum([operator.light for operator in kind.operators], axis=0)
    return full, light


def _ranges(numbers: list[int]) -> str:
    """`0-3 5` for [0, 1, 2, 3, 5]."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ' '.join(str(p[0]) if len(p) == 1 else f'{p[0]}-{p[-1]}' for p in parts)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
