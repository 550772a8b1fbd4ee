# SPDX-License-Identifier: Apache-2.0
"""Bytes that move between nodes when another layout resumes from the newest windows.

An operator's elements lie in one order in every layout, and each rank owns a contiguous part of
them. A new rank reads the elements that old ranks of its node owned from the node's memory, and all
others from their owner's node or from a replica. Nodes keep their numbers; a node that is left out
still serves its windows, and a new node has none. Only the state of one iteration is counted: a
window of W iterations also has compute weights, which are small in comparison.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tools.plan.layout import Layout
from tools.plan.planning import Job, JobPlan
from tools.plan.sizes import operator_sizes
from tools.simulate import fields


@dataclass(frozen=True)
class Moved:
    """Bytes that the new ranks read."""

    state_bytes: int
    """One complete state."""
    read_bytes: int
    """All that ranks read, from their own node and from others; above `state_bytes` where several
    ranks need the same bytes."""
    remote_bytes: int
    """Read from other nodes."""
    busiest_bytes: int
    """Received from other nodes, or sent to them, by the busiest node."""
    seconds: float
    """At the rate of a node's network, which training does not use meanwhile."""


# Rank, and the bytes [begin, end) that it owns of a tensor-parallel part of an operator.
_Part = tuple[int, int, int]


def moved(before: JobPlan, after: JobPlan) -> Moved:
    """Compute what a change of the layout moves.

    Raises:
        FieldError: the layouts divide tensors differently.
    """
    _require_equal_tensors(before.job.layout, after.job.layout)
    old, new = _parts(before), _parts(after)
    width = before.job.ranks_per_node, after.job.ranks_per_node
    received: dict[int, int] = defaultdict(int)
    sent: dict[int, int] = defaultdict(int)
    state = read = 0
    for key, wanted in new.items():
        held = [(rank // width[0], begin, end) for rank, begin, end in old[key]]
        state += max(end for _, _, end in held)
        for rank, begin, end in wanted:
            node = rank // width[1]
            read += end - begin
            for other, nbytes in _sources(node, begin, end, held):
                received[node] += nbytes
                sent[other] += nbytes
    busiest = max((*received.values(), *sent.values()), default=0)
    rate = after.job.cluster.network_bytes_per_s
    return Moved(state, read, sum(received.values()), busiest, busiest / rate)


def _sources(node: int, begin: int, end: int, held: list[_Part]) -> Iterator[tuple[int, int]]:
    """Other nodes from which a range is read, with bytes; leaves out bytes on the own node."""
    at = begin
    while at < end:
        here = [one for one in held if one[1] <= at < one[2]]
        if not here:  # a scale, which each owner has, or the last stage's copy of the words
            return
        own = next((one for one in here if one[0] == node), None)
        source = own or here[node % len(here)]
        until = min(end, source[2])
        if own is None:
            nearer = (one[1] for one in held if one[0] == node and at < one[1] < until)
            until = min(nearer, default=until)
            yield source[0], until - at
        at = until


def _parts(plan: JobPlan) -> dict[tuple[str, int], list[_Part]]:
    """Owned parts by operator and tensor-parallel index, in the order of their elements."""
    job, found = plan.job, defaultdict[tuple[str, int], list[_Part]](list)
    for stage in range(job.layout.pipeline):
        operators = operator_sizes(job.model, job.layout, job.precision, stage)
        for name, full in zip(operators.names, operators.full, strict=True):
            tensor = _divisor(job, name)
            owners = np.flatnonzero(full).tolist()
            for index in range(tensor):
                of_index = [rank for rank in owners if rank % tensor == index]
                found[name, index] += _owned(job, stage, full.tolist(), of_index)
    return found


def _owned(job: Job, stage: int, full: list[int], ranks: list[int]) -> Iterator[_Part]:
    at = 0
    for rank in ranks:
        size = full[rank]
        begin = at if job.layout.distributed_optimizer else 0
        yield stage * job.layout.stage_ranks + rank, begin, begin + size
        at += size


def _divisor(job: Job, operator: str) -> int:
    layout = job.layout
    return layout.tensor_of_experts if '.expert' in operator else layout.tensor


def _require_equal_tensors(before: Layout, after: Layout) -> None:
    for name in ('tensor', 'tensor_of_experts'):
        was, now = getattr(before, name), getattr(after, name)
        rule = f'windows divide tensors by {was}; another number needs a checkpoint'
        fields.require(was == now, name.replace('tensor_of_experts', 'expert_tensor'), now, rule)
