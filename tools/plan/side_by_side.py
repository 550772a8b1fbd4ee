# SPDX-License-Identifier: Apache-2.0
"""Two layouts of a job side by side, and what moves from the first to the second."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from moevement_ext.memory.budget import GIB, gib
from tools.lab.tables import table
from tools.plan.description import DescriptionError
from tools.plan.layout import Layout
from tools.plan.moving import Moved, moved
from tools.plan.planning import Job, JobPlan, iteration_seconds
from tools.plan.report import as_json, infeasible, rank_bytes

_FIELDS = {'gpus': 'ranks', 'pipeline': 'pipeline', 'expert': 'expert', 'chunks': 'chunks'}
FORM = 'gpus=N,pipeline=N,expert=N,chunks=N'
"""Form of a second layout; omitted sizes are those of the first."""


def other_layout(text: str, layout: Layout) -> Layout:
    """Parse a layout that is given by its differences from `layout`.

    Raises:
        DescriptionError: the text has another form.
        FieldError: the sizes do not fit together.
    """
    changes: dict[str, Any] = {'layers_per_stage': None}
    for item in text.split(','):
        name, _, value = item.partition('=')
        if name not in _FIELDS or not value.isdecimal():
            raise DescriptionError(f'--to-layout {text}: give {FORM}, or some of them')
        changes[_FIELDS[name]] = int(value)
    return dataclasses.replace(layout, **changes)


def with_layout(job: Job, layout: Layout, mfu: float | None) -> Job:
    """The same job in another layout.

    Without `mfu`, the iteration time of the first layout is scaled by the number of GPUs.
    """
    seconds = job.iteration_s * job.layout.ranks / layout.ranks
    if mfu is not None:
        seconds = iteration_seconds(job.model, layout, job.batch, job.cluster, mfu)
    return dataclasses.replace(job, layout=layout, iteration_s=seconds)


def both_as_json(before: JobPlan, after: JobPlan, unused_flags: list[str]) -> dict[str, Any]:
    """Results of both plans, and what moves; bytes and seconds."""
    return {
        'from': as_json(before, unused_flags),
        'to': as_json(after, unused_flags),
        'moved': dataclasses.asdict(moved(before, after)),
    }


def print_both(before: JobPlan, after: JobPlan, console: Console) -> None:
    """Print both layouts as columns, and what moves."""
    what = moved(before, after)
    pairs = zip(_rows(before), _rows(after), strict=True)
    rows = [(name, was, now) for (name, was), (_, now) in pairs]
    console.print(table(('', '>from', '>to'), rows, title=before.job.model.name))
    console.print(_line(what, after), highlight=False, soft_wrap=True)
    if before.window > 1:
        console.print(
            f'A window of {before.window} is replayed in the new layout, which is equal up to '
            'rounding; with --sparse-ckpt-window 1 it is exact.',
            highlight=False,
            soft_wrap=True,
        )


def why_not(before: JobPlan, after: JobPlan) -> str | None:
    """Reason why one of the layouts would not train, with a remedy; None if both would."""
    for name, plan in (('from', before), ('to', after)):
        reason = infeasible(plan)
        if reason:
            return f'{name}: {reason}'
    return None


def _rows(plan: JobPlan) -> Iterator[tuple[str, str]]:
    job, layout, memory = plan.job, plan.job.layout, plan.host_memory()
    yield 'GPUs, nodes', f'{layout.ranks}, {job.nodes}'
    sizes = layout.pipeline, layout.chunks, layout.tensor, layout.expert, layout.data
    yield 'PP, VPP, TP, EP, DP', ', '.join(map(str, sizes))
    yield 'micro-batches of a rank', str(job.batch.micro_batches(layout.data))
    yield 'seconds per iteration', f'{job.iteration_s:.2f}'
    yield 'window', str(plan.window)
    yield 'host memory per node', gib(memory.node_total)
    state = max(rank_bytes(kind)[0] for kind in plan.kinds)
    yield 'captured state of the largest rank', gib(state)


def _line(what: Moved, after: JobPlan) -> str:
    return (
        f'Moves: of {what.state_bytes / GIB:.1f} GiB of state {what.remote_bytes / GIB:.1f} GiB '
        f'come from other nodes, {what.busiest_bytes / GIB:.1f} GiB at the busiest of '
        f'{after.job.nodes}: {what.seconds:.1f} s of its network; ranks read '
        f'{what.read_bytes / GIB:.1f} GiB in all.'
    )
