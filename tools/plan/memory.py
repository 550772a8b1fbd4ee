# SPDX-License-Identifier: Apache-2.0
"""Host memory that the training will reserve, by kind, and what a stage logs per iteration.

Sizes are those of `memory.sizing`, as in the training. Here is what goes into them.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from moevement_ext.memory.budget import HostMemoryPlan
from moevement_ext.memory.sizing import (
    NOTHING_LOGGED,
    SLOT_ROOM_BYTES,
    Logged,
    log_ring_bytes,
    rank_memory,
    stub_file_bytes,
    window_file_bytes,
)
from moevement_ext.memory.upstream_log.ring import region_bytes
from moevement_ext.memory.window.format import window_capacity
from moevement_ext.plan.byte_planner import OperatorBytes, window_bytes_bound
from moevement_ext.replicate.copies import Copies, place_copies
from tools.plan.layout import Batch, Layout, Precision
from tools.plan.model import ModelShape

CHECKSUM_BYTES_PER_S = 12e9
"""xxh3_64 of memory, on one core (measured on an AMD EPYC with AVX2)."""
ANNOUNCEMENT_S = 0.1
"""From the last report of a window until all ranks have read in the store that it is persisted."""


def window_files(
    operators: Sequence[OperatorBytes], longest_window: int, always: int = 0
) -> list[int]:
    """Bytes of a window file on each rank of a stage, enough for any plan up to that length.

    `always` bytes, besides, are in every slot of each rank.
    """
    bounds = window_bytes_bound(operators, longest_window)
    slots = [(always, SLOT_ROOM_BYTES)] * longest_window if always else []
    return [
        window_file_bytes(state, longest_window, window_capacity([(state, 0), *slots]))
        for state in bounds
    ]


def stub_files(
    operators: Sequence[OperatorBytes], longest_window: int, always: int = 0
) -> list[int]:
    """Bytes of a file for the stubs of such windows, which ranks that capture the same keep."""
    bounds = window_bytes_bound(operators, longest_window)
    needed = window_capacity([(always, SLOT_ROOM_BYTES)] * longest_window) if always else 0
    return [stub_file_bytes(state, longest_window, needed) for state in bounds]


@lru_cache(maxsize=16)
def copies(layout: Layout, ranks_per_node: int, replicas: int) -> Copies:
    """Where the training has them. Consecutive ranks share a node, which is a failure domain."""
    nodes = [str(rank // ranks_per_node) for rank in range(layout.ranks)]
    return place_copies(nodes, replicas, [layout.family_of(rank) for rank in range(layout.ranks)])


def logged_per_iteration(
    model: ModelShape, layout: Layout, batch: Batch, precision: Precision, stage: int
) -> Logged:
    """What a rank of `stage` logs of what it sends to its neighbours in one iteration.

    Each micro-batch and chunk sends one activation down and one gradient up, but for the ends of
    the pipeline (paper, section 3.4). Raises FieldError if micro-batches do not come out even.
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


def log_lag(layout: Layout, batch: Batch, seconds: float, iteration_s: float) -> float:
    """Share of an iteration's log that is written in its first `seconds`, rounded up to 0.001.

    While micro-batches fill the pipeline a stage sends one tensor per forward computation, later
    two per forward and backward, which take three times as long. Those that fill it are as many as
    there are stages, with more chunks twice that and once more for each further chunk; then every
    stage waits for the first gradient to come back.
    """
    elapsed = seconds / iteration_s
    chunks = layout.chunks
    filling = layout.pipeline * (1 if chunks == 1 else chunks + 1)
    sends = 2 * chunks * batch.micro_batches(layout.data)
    lag = max(elapsed, min(1.5 * elapsed, filling / sends))
    return math.ceil(round(1000 * lag, 6)) / 1000


def log_rings(logged: Sequence[Logged], longest_window: int, lag: float) -> list[int]:
    """Bytes of the log of a rank of each stage, from what those log."""
    most = max(logged, key=lambda one: one.iteration_bytes)
    return [log_ring_bytes(one, most, longest_window, lag) for one in logged]


def fullest_node(
    window_files: np.ndarray,
    log_rings: np.ndarray,
    ranks_per_node: int,
    copies: Copies,
    disk: bool = False,
    stub_files: np.ndarray | None = None,
) -> HostMemoryPlan:
    """What the ranks of the node with the highest need keep.

    Args:
        window_files: bytes of a window file of each rank, int64 (ranks,).
        log_rings: bytes of the log of each rank, int64 (ranks,).
        ranks_per_node: consecutive ranks share a node, which is a failure domain.
        copies: where those of each rank are.
        disk: windows are copied to disk, too.
        stub_files: bytes of a file for stubs of each rank, int64 (ranks,); None: none are kept.
    """
    nodes = np.arange(len(window_files)) // ranks_per_node
    kept: list[list[int]] = [[] for _ in window_files]
    stubs = np.zeros_like(window_files) if stub_files is None else stub_files
    for sizes, places in ((window_files, copies.holders), (stubs, copies.twins)):
        for owner, held_by in enumerate(places):
            for rank in held_by:
                kept[rank].append(int(sizes[owner]))
    ranks = {
        rank: rank_memory(int(window_files[rank]), kept[rank], int(log_rings[rank]), disk)
        for rank in range(len(window_files))
    }
    need = np.bincount(nodes, weights=[memory.total for memory in ranks.values()])
    members = np.flatnonzero(nodes == need.argmax())
    return HostMemoryPlan({rank: ranks[rank] for rank in members.tolist()})
