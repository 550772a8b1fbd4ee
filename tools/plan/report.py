# SPDX-License-Identifier: Apache-2.0
"""A plan as a table for people and as JSON for programs, with reasons and warnings.

The reasons say why a plan cannot work; the warnings name costs that a user might overlook.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console

from moevement_ext.memory.file_system import GIB, gib

from ..lab.tables import say, table
from .planning import JobPlan, StageKind

# Megatron's main gradients are fp32.
_GRADIENT_BYTES = 4


def as_json(plan: JobPlan, unused_flags: list[str]) -> dict[str, Any]:
    """All results of a plan; bytes, seconds and shares."""
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
        'log_lag': plan.enough_log_lag(),
        'host_memory_bytes_per_node': {**memory.by_kind(), 'total': memory.node_total},
        'host_memory_taken_bytes_per_node': plan.taken_bytes(),
        'host_memory_available_bytes': job.cluster.host_memory_bytes,
        'mtbf_s': effect.mtbf_s,
        'restart_s': effect.restart_s,
        'expected_recovery_s': effect.expected_recovery_s(),
        'worst_recovery_s': effect.worst_recovery_s(),
        'ettr_first_order': effect.ettr_first_order(),
        'ettr_exact': effect.ettr_exact(),
        'algorithm_1': msgspec.structs.asdict(plan.paper),
        'warnings': warnings(plan),
        'infeasible': infeasible(plan),
        'unused_flags': unused_flags,
    }


def _stage_json(kind: StageKind) -> dict[str, Any]:
    full, weights = rank_bytes(kind)
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
    job = plan.job
    text = (
        f'{job.model.name}: {job.model.total_parameters / 1e9:.1f}e9 parameters, '
        f'{job.model.active_parameters / 1e9:.1f}e9 active, on {job.layout.ranks} GPUs of '
        f'{job.nodes} nodes ({job.cluster.name}), {job.iteration_s:.2f} s per iteration'
    )
    say(console, text)
    columns = 'stages', '>operators', '>full', '>weights', '>operators of slots', '>GiB of slots'
    title = f'Window of {plan.window}; bytes of the largest rank of a stage'
    console.print(table(columns, map(_stage_row, plan.kinds), title=title))
    console.print(table(('', ''), [*_cost_rows(plan), *_recovery_rows(plan)], show_header=False))
    for text in warnings(plan):
        say(console, f'Warning: {text}.')
    if unused_flags:
        say(console, f'Not part of a plan: {" ".join(unused_flags)}')


def _stage_row(kind: StageKind) -> tuple[str, ...]:
    full, weights = rank_bytes(kind)
    slots = kind.slot_bytes().max(axis=1).tolist()
    return (
        _ranges(kind.stages), str(len(kind.operators)), gib(full), gib(weights),
        ' '.join(str(len(slot)) for slot in kind.plan.slots),
        ' '.join(f'{size / GIB:.2f}' for size in slots),
    )  # fmt: skip


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
        ('persisting a window takes', f'{plan.persist_s():.2f} s{_shorter_log(plan)}'),
        ('host memory per node', f'{gib(memory.node_total)} of '
                                 f'{gib(int(job.cluster.host_memory_bytes))}: {kinds}'),
        ("the paper's Algorithm 1", f'window {plan.paper.window}, ' + (
            f'{gib(over)} over budget' if over else 'within budget')),
    ]  # fmt: skip


def _shorter_log(plan: JobPlan) -> str:
    """Text on the node's host memory with a shorter sufficient log; empty without a shorter one."""
    lag = plan.enough_log_lag()
    if plan.job.protection.log_lag <= lag:
        return ''
    need = gib(plan.host_memory(log_lag=lag).node_total)
    return f'; with --sparse-ckpt-log-lag {lag:g}, which suffices, a node needs {need}'


def _recovery_rows(plan: JobPlan) -> list[tuple[str, str]]:
    effect = plan.effectiveness()
    return [
        ('recovery', f'{effect.expected_recovery_s():.1f} s on average, at most '
         f'{effect.worst_recovery_s():.1f} s, {effect.restart_s:g} s of them restart'),
        ('time between failures', f'{effect.mtbf_s:.0f} s ({effect.mtbf_s / 3600:.2f} h)'),
        ('expected ETTR', f'{effect.ettr_exact():.4f} (first order: '
                          f'{effect.ettr_first_order():.4f})'),
    ]  # fmt: skip


def rank_bytes(kind: StageKind) -> tuple[int, int]:
    """Bytes of the largest rank of the stage, with all operators full and all weights."""
    full, weights = kind.operators.full.sum(axis=0), kind.operators.weights.sum(axis=0)
    return int(full.max()), int(weights.max())


def _ranges(numbers: list[int]) -> str:
    """Format numbers as ranges: `0-3 5` for [0, 1, 2, 3, 5]."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ' '.join(str(p[0]) if len(p) == 1 else f'{p[0]}-{p[-1]}' for p in parts)


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
    return f'{needed.describe()}, but a node has {gib(int(available))}: {" or ".join(remedies)}'


def warnings(plan: JobPlan) -> list[str]:
    """Warnings of one or two sentences, with numbers and remedies."""
    checks = (_window, _network, _exposed, _memory, _domains, _recovery, _hardware)
    return [text for check in checks for text in check(plan)]


def _window(plan: JobPlan) -> Iterator[str]:
    fixed = plan.job.protection.window
    if fixed is not None and plan.fewest is not None and fixed > plan.fewest:
        yield (
            f'window {fixed} is longer than need be: {plan.fewest} fits; a longer one makes '
            f'recovery longer and saves nothing'
        )


def _network(plan: JobPlan) -> Iterator[str]:
    if plan.limited_by == 'network':
        yield (
            f'the network makes the window longer ({plan.job.copies} replicas leave each node); by '
            f'the copy to host memory alone it would be {plan.fewest_by_copy}'
        )
    needed, offered = plan.replicated_bytes(), plan.network_bytes()
    if needed > offered:
        yield (
            f'replication needs {needed / 1e9:.2f} GB per node and iteration, the network share '
            f'offers {offered / 1e9:.2f} GB: windows will be skipped, so that a failure costs more '
            f'than stated here; use a longer window, fewer replicas or a larger share'
        )


def _exposed(plan: JobPlan) -> Iterator[str]:
    needed, fewest, settings = plan.fewest_by_copy, plan.fewest, plan.job.protection
    worst = float(plan.exposed_s().max())
    if settings.window is None and fewest != plan.window:
        carried = 'no window of a sensible length' if fewest is None else f'a window of {fewest}'
        shrunk = plan.longest < settings.longest_window
        remedy = 'find host memory' if shrunk else 'set a longer --sparse-ckpt-window'
        yield (
            f'the links carry {carried}, the longest is {plan.window}; {remedy}, or accept what '
            f'follows'
        )
    if worst > 0:
        remedy = f'a window of {needed} hides it' if needed else 'no window hides it'
        yield f'the copy lengthens the worst iteration by {worst:.3f} s: {remedy}'


def _memory(plan: JobPlan) -> Iterator[str]:
    longest, allowed = plan.longest, plan.job.protection.longest_window
    if longest < allowed:
        yield (
            f'host memory has no room for windows of {allowed}: `auto` takes {longest} at most. '
            f'--sparse-ckpt-log-lag {plan.enough_log_lag():g} may leave room for longer ones'
        )
    if plan.window < longest:
        reserved, enough = plan.host_memory().node_total, plan.host_memory(plan.window).node_total
        yield (
            f'a node needs room for windows of {longest} ({gib(reserved)}, of which it takes '
            f'{gib(plan.taken_bytes())} until windows are longer); --sparse-ckpt-window '
            f'{plan.window} needs {gib(enough)}'
        )


def _domains(plan: JobPlan) -> Iterator[str]:
    job = plan.job
    if job.nodes == 1:
        yield (
            'one node is one failure domain: windows survive the death of processes, not of the '
            'node; write dense checkpoints too'
        )
    elif job.copies < job.protection.replicas:
        yield f'{job.nodes} nodes leave room for {job.copies} replicas only'
    elif job.copies == 0:
        yield 'without replicas the loss of a node falls back to the last dense checkpoint'
    stages = len({job.layout.stage_of(rank) for rank in range(job.ranks_per_node)})
    if job.nodes > 1 and stages > 1:
        yield f'a node holds ranks of {stages} stages, which are lost and replay together'


def _recovery(plan: JobPlan) -> Iterator[str]:
    mtbf, worst = plan.job.failures.mtbf_s, plan.effectiveness().worst_recovery_s()
    if worst > mtbf / 10:
        yield (
            f'the worst recovery takes {worst:.0f} s at {mtbf:.0f} s between failures: many will '
            f'be struck by the next failure; shorten the restart or the window'
        )


def _hardware(plan: JobPlan) -> Iterator[str]:
    precision, available = plan.job.precision, plan.job.cluster.gpu_memory_bytes
    narrow = precision.compute == 'fp8' and precision.master != 'fp32'
    if narrow and not precision.amax_history:
        yield (
            'upstream supports fp8 weights with masters below fp32 only with --fp8-recipe delayed; '
            'the plan shows the bytes that they would take'
        )
    if precision.master == 'fp8':
        yield (
            'masters in fp8 lose updates that are small relative to a weight; compare losses '
            '(moevement bench overhead --precision all)'
        )
    of_full = precision.optimizer_bytes / precision.full_bytes
    state = max(
        kind.held_parameters * (precision.weight_bytes + _GRADIENT_BYTES)
        + rank_bytes(kind)[0] * of_full
        for kind in plan.kinds
    )
    if state > available:
        yield (
            f'the largest rank holds {state / 1e9:.1f} GB of weights, gradients and optimizer '
            f'state, a GPU has {available / 1e9:.0f} GB'
        )
