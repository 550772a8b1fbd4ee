# SPDX-License-Identifier: Apache-2.0
"""What the two runs left behind, turned into the figures that the demo reports."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.slot import SlotHeader, decode_context
from tools.demo.failure import DemoError
from tools.plot_run import Iteration, RunLog

WARM_UP_ITERATIONS = 5


class CapturedBytes(NamedTuple):
    """Bytes that one rank captured in one window."""

    slots: list[int]
    """Payload of each slot."""
    dense: int
    """What every operator takes in full: a dense checkpoint of this rank."""


class Recovery(NamedTuple):
    """How a job came back all of whose workers were started again."""

    replayed: int
    """Iterations computed again."""
    seconds: float
    """From the kill until the slowest rank was back where the job had been."""
    phases: dict[str, float]
    """Seconds by phase on the slowest rank, the restart of the processes first."""


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All complete events of a run in the order of time."""
    found = [
        msgspec.json.decode(line, type=dict[str, Any])
        for path in sorted(folder.glob('rank*.jsonl'))
        for line in path.read_bytes().splitlines(keepends=True)
        if line.endswith(b'\n')
    ]
    return sorted(found, key=lambda event: event['time'])


def ranks_with(events: Sequence[dict[str, Any]], name: str) -> set[int]:
    """Ranks that emitted an event."""
    return {event['rank'] for event in events if event['event'] == name}


def recovery(events: Sequence[dict[str, Any]], killed_at: float, world_size: int) -> Recovery:
    """Replay and times out of the `recovered` events of a job that was started again.

    Raises:
        DemoError: a rank did not recover from host memory.
    """
    fallen_back = [event for event in events if event['event'] == 'next_tier']
    if fallen_back:
        raise DemoError(f'host memory was not used: {fallen_back[0]["reason"]}')
    recovered = [event for event in events if event['event'] == 'recovered']
    missing = set(range(world_size)) - ranks_with(recovered, 'recovered')
    if missing:
        raise DemoError(f'ranks {sorted(missing)} did not report a recovery')
    slowest = recovered[-1]
    seconds = slowest['time'] - killed_at
    phases: dict[str, float] = slowest['seconds']
    restart = max(0.0, seconds - sum(phases.values()))
    return Recovery(slowest['replayed'], seconds, {'restart': restart, **phases})


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
