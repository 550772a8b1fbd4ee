# SPDX-License-Identifier: Apache-2.0
"""Host memory that the training will reserve, by kind, and what a stage logs per iteration.

Mirrors what the training does before iteration 1: window files are sized for the longest window
that may be planned, each rank keeps GENERATIONS of its own and of those it holds for others, and
the log reaches back over two such windows. Slot headers (some 100 bytes per tensor) are left out.
"""

from collections.abc import Sequence

import numpy as np

from moevement_ext.memory.budget import HostMemoryPlan, RankMemory
from moevement_ext.memory.ledger import Ledger
from moevement_ext.memory.upstream_log.ring import region_bytes
from moevement_ext.memory.window.format import window_capacity
from moevement_ext.plan.byte_planner import OperatorBytes, window_bytes_bound
from moevement_ext.replicate.placement import place_replicas
from moevement_ext.simulate.layout import Batch, Layout, Precision
from moevement_ext.simulate.model import ModelShape

# Equal to the constants of the training, which live beside code that needs torch.
GENERATIONS = 3
LEDGER_RECORDS = 4096
LATE_ITERATIONS = 4


def window_file_bytes(operators: Sequence[OperatorBytes], longest_window: int) -> list[int]:
    """Bytes of a window file on each rank of a stage, enough for any plan up to that length."""
    bounds = window_bytes_bound(operators, longest_window)
    return [window_capacity([(payload, 0)]) for payload in bounds]


def logged_bytes_per_iteration(
    model: ModelShape, layout: Layout, batch: Batch, precision: Precision, stage: int
) -> int:
    """Bytes that a rank of `stage` logs of what it sends to its neighbours in one iteration.

    Each micro-batch and chunk sends one activation down and one gradient up, but for the ends of
    the pipeline (paper, section 3.4). Raises FieldError if micro-batches do not come out even.
    """
    micro_batches = batch.micro_batches(layout.data)
    if layout.pipeline == 1:
        return 0
    ends = (stage == 0) + (stage == layout.pipeline - 1)
    shards = layout.context * (layout.tensor if layout.sequence_parallel else 1)
    elements = batch.sequence_length // shards * batch.micro_batch_size * model.hidden_size
    sent = micro_batches * (2 * layout.chunks - ends)
    return sent * region_bytes(elements * precision.boundary_bytes)


def log_iterations(longest_window: int) -> int:
    """Iterations that the log ring keeps: a window persists while its successor is captured."""
    return 2 * longest_window + LATE_ITERATIONS


def fullest_node(
    window_files: np.ndarray, log_rings: np.ndarray, ranks_per_node: int, replicas: int
) -> HostMemoryPlan:
    """What the ranks of the node with the highest need keep.

    Args:
        window_files: bytes of a window file of each rank, int64 (ranks,).
        log_rings: bytes of the log of each rank, int64 (ranks,).
        ranks_per_node: consecutive ranks share a node, which is a failure domain.
        replicas: copies on other nodes.
    """
    nodes = np.arange(len(window_files)) // ranks_per_node
    hosted = np.zeros(len(window_files), dtype=np.int64)
    holders = place_replicas([str(node) for node in nodes], replicas)
    for owner, held_by in enumerate(holders):
        hosted[list(held_by)] += window_files[owner]
    need = np.bincount(nodes, weights=GENERATIONS * (window_files + hosted) + log_rings)
    members = np.flatnonzero(nodes == need.argmax())
    return HostMemoryPlan(
        {
            rank: RankMemory(
                own_windows=GENERATIONS * int(window_files[rank]),
                replicas=GENERATIONS * int(hosted[rank]),
                ledger=Ledger.bytes_needed(LEDGER_RECORDS),
                log_ring=int(log_rings[rank]),
            )
            for rank in members.tolist()
        }
    )
