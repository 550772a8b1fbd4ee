# SPDX-License-Identifier: Apache-2.0
"""What a user should know about a plan: why it cannot work, and what it would cost unnoticed."""

from collections.abc import Iterator

from moevement_ext.memory.budget import gib
from tools.plan.planning import JobPlan

_GRADIENT_BYTES = 4
"""Megatron's main gradients are fp32."""


def infeasible(plan: JobPlan) -> str | None:
    """Why training by this plan would be refused, and what to do; None if it would not."""
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
    """One sentence or two each, with the numbers and what to do."""
    checks = (_window, _network, _exposed, _memory, _domains, _recovery, _hardware)
    return [text for check in checks for text in check(plan)]


def _window(plan: JobPlan) -> Iterator[str]:
    fixed = plan.job.protection.window
    if fixed is None or plan.fewest is None:
        return
    if fixed > plan.fewest:
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
    needed = plan.fewest_by_copy
    worst = float(plan.exposed_s().max())
    if plan.job.protection.window is None and plan.fewest != plan.window:
        shrunk = plan.longest < plan.job.protection.longest_window
        remedy = 'find host memory' if shrunk else 'raise --sparse-ckpt-max-window'
        yield (
            f'the links carry {_window_of(plan.fewest)}, the longest is {plan.window}; '
            f'{remedy}, or accept what follows'
        )
    if worst > 0:
        remedy = f'a window of {needed} hides it' if needed else 'no window hides it'
        yield f'the copy lengthens the worst iteration by {worst:.3f} s: {remedy}'


def _window_of(fewest: int | None) -> str:
    return 'no window of a sensible length' if fewest is None else f'a window of {fewest}'


def _memory(plan: JobPlan) -> Iterator[str]:
    longest, allowed = plan.longest, plan.job.protection.longest_window
    if longest < allowed:
        yield (
            f'host memory has no room for windows of {allowed}: `auto` takes {longest} at most. '
            f'--sparse-ckpt-log-lag {plan.log_lag():g} may leave room for longer ones'
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
    mtbf = plan.job.failures.mtbf_s
    effect = plan.effectiveness()
    worst = effect.recovery_range_s()[1]
    if worst > mtbf / 10:
        yield (
            f'the worst recovery takes {worst:.0f} s at {mtbf:.0f} s between failures: many will '
            f'be struck by the next failure; shorten the restart or the window'
        )


def _hardware(plan: JobPlan) -> Iterator[str]:
    job = plan.job
    narrow = job.precision.compute == 'fp8' and job.precision.master != 'fp32'
    if narrow and not job.precision.amax_history:
        yield (
            'upstream has weights in fp8 beside masters below fp32 with --fp8-recipe delayed only; '
            'the plan shows what they would take'
        )
    if job.precision.master == 'fp8':
        yield (
            'masters in fp8 lose updates that are small beside a weight; compare the losses '
            '(python -m tools.bench.precision)'
        )
    of_full = job.precision.optimizer_bytes / job.precision.full_bytes
    state = max(
        kind.held_parameters * (job.precision.light_bytes + _GRADIENT_BYTES)
        + max(sum(column) for column in zip(*(op.full for op in kind.operators), strict=True))
        * of_full
        for kind in plan.kinds
    )
    if state > job.cluster.gpu_memory_bytes:
        yield (
            f'the largest rank holds {state / 1e9:.1f} GB of weights, gradients and optimizer '
            f'state, a GPU has {job.cluster.gpu_memory_bytes / 1e9:.0f} GB'
        )
