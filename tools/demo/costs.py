# SPDX-License-Identifier: Apache-2.0
"""What the two runs cost: bytes of slots and of dense checkpoints, and time per iteration."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.slot import SlotHeader, decode_context
from tools.lab.run_log import Iteration, RunLog

WARM_UP_ITERATIONS = 5


class CapturedBytes(NamedTuple):
    """Bytes that one rank captured in one window."""

    slots: list[int]
    """Payload of each slot."""
    dense: int
    """What every operator takes in full: a dense checkpoint of this rank."""


def captured_bytes(store: NodeStore) -> dict[int, CapturedBytes]:
    """Bytes by rank, from the newest window of each rank that a node holds, replicas included."""
    newest: dict[int, CapturedBytes] = {}
    for window in store.scan():  # newest first
        if window.owner not in newest:
            newest[window.owner] = _window_bytes(WindowFile.open(window.path).headers())
    return newest


def _window_bytes(headers: Sequence[SlotHeader]) -> CapturedBytes:
    dense = 0
    for header in headers:
        full = set(decode_context(header.context).full)
        dense += sum(record.nbytes for record in header.records if record.operator in full)
    return CapturedBytes([header.payload_bytes for header in headers], dense)


def slot_over_dense(captured: dict[int, CapturedBytes]) -> float:
    """Bytes of the mean slot against a dense checkpoint, over all ranks."""
    slots = sum(statistics.mean(rank.slots) for rank in captured.values())
    return slots / sum(rank.dense for rank in captured.values())


def overhead(plain: RunLog, sparse: RunLog, killed_at: float) -> tuple[float, float]:
    """Median milliseconds per iteration without and with sparse checkpointing.

    Taken over the same iterations of both runs: after the first ones, before the failure.
    """
    before = [iteration for iteration in sparse.iterations if iteration.time <= killed_at]
    undisturbed = {iteration.number for iteration in before[WARM_UP_ITERATIONS:]}
    return _median_ms(plain.iterations, undisturbed), _median_ms(before, undisturbed)


def _median_ms(iterations: Sequence[Iteration], numbers: set[int]) -> float:
    return statistics.median(item.elapsed_ms for item in iterations if item.number in numbers)
