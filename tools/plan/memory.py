# SPDX-License-Identifier: Apache-2.0
"""Host memory that training reserves, by kind, and the log of a stage per iteration.

Sizes come from `memory.budget`, as in training. This module computes its arguments.
"""

from collections.abc import Sequence

import numpy as np

from moevement_ext.memory.budget import (
    NOTHING_LOGGED,
    SLOT_ROOM_BYTES,
    HostMemoryPlan,
    Logged,
    log_ring_bytes,
    rank_memory,
    stub_file_bytes,
    window_file_bytes,
)
from moevement_ext.memory.upstream_log.record import region_bytes
from moevement_ext.memory.window.format import window_capacity
from moevement_ext.plan.byte_planner import OperatorTable, window_bytes_bound
from moevement_ext.replicate.placement import place_copies

from ..model.layout import Batch, Layout, Precision
from ..model.shape import ModelShape


def window_files(operators: OperatorTable, longest_window: int, always: int = 0) -> np.ndarray:
    """Bytes of a window file on each rank of a stage, for any plan up to the longest window.

    In addition, `always` bytes are in every slot of each rank.
    """
    slots = [(always, SLOT_ROOM_BYTES)] * longest_window if always else []
    files = (
        window_file_bytes(state, longest_window, window_capacity([(state, 0), *slots]))
        for state in window_bytes_bound(operators, longest_window).tolist()
    )
    return np.fromiter(files, np.int64)


def stub_files(operators: OperatorTable, longest_window: int) -> np.ndarray:
    """Bytes of a twin's stub file for the windows of each rank of a stage."""
    bounds = window_bytes_bound(operators, longest_window).tolist()
    return np.array([stub_file_bytes(state, longest_window) for state in bounds])


def logged_per_iteration(
    model: ModelShape, layout: Layout, batch: Batch, precision: Precision, stage: int
) -> Logged:
    """Bytes that a rank of `stage` logs of its sends to neighbours in one iteration.

    Each micro-batch and chunk sends one activation down and one gradient up, except at the ends of
    the pipeline (paper, section 3.4). Raises FieldError if the number of micro-batches is not an
    integer.
    """
    micro_batches = batch.micro_batches(layout.data)
    if layout.pipeline == 1:
        return NOTHING_LOGGED
    ends = (stage == 0) + (stage == layout.pipeline - 1)
    shards = layout.context * (layout.tensor if layout.sequence_parallel else 1)
    elements = batch.sequence_length // shards * batch.micro_batch_size * model.hidden_size
    sent = micro_batches * (2 * layout.chunks - ends)
    record = region_bytes(elements * precision.boundary_bytes)
    return Logged(sent * record, record)


def log_rings(logged: Sequence[Logged], longest_window: int, lag: float) -> list[int]:
    """Bytes of the log of a rank of each stage, given what these ranks log."""
    most = max(logged, key=lambda one: one.iteration_bytes)
    return [log_ring_bytes(one, most, longest_window, lag) for one in logged]


def fullest_node(
    window_files: np.ndarray,
    stub_files: np.ndarray,
    log_rings: np.ndarray,
    families: Sequence[int],
    ranks_per_node: int,
    replicas: int,
    disk: bool = False,
) -> HostMemoryPlan:
    """Host memory of the ranks on the node that needs most.

    Args:
        window_files: bytes of a window file of each rank, int64 (ranks,).
        stub_files: bytes of a twin's stub file for the windows of each rank, int64 (ranks,).
        log_rings: bytes of the log of each rank, int64 (ranks,).
        families: lowest rank with the same captures, by rank.
        ranks_per_node: consecutive ranks share a node, which is a failure domain.
        replicas: number of copies on other nodes.
        disk: windows are also copied to disk.
    """
    nodes = np.arange(len(window_files)) // ranks_per_node
    kept: list[list[int]] = [[] for _ in nodes]
    copies = place_copies([str(node) for node in nodes], replicas, families)
    for owner, (whole, stubs) in enumerate(zip(copies.holders, copies.twins, strict=True)):
        for rank in whole:
            kept[rank].append(int(window_files[owner]))
        for rank in stubs:
            kept[rank].append(int(stub_files[owner]))
    ranks = {
        rank: rank_memory(int(window_files[rank]), kept[rank], int(log_rings[rank]), disk)
        for rank in range(len(window_files))
    }
    need = np.bincount(nodes, weights=[memory.total for memory in ranks.values()])
    members = np.flatnonzero(nodes == need.argmax())
    return HostMemoryPlan({rank: ranks[rank] for rank in members.tolist()})
