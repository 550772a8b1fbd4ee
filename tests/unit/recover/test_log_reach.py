# SPDX-License-Identifier: Apache-2.0
"""The log is as large as it must be, and no larger: whatever fails, it holds what a replay asks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.membership.report import Report
from moevement_ext.memory.budget import Logged, log_ring_bytes
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import Direction, LogGap, LogKey, region_bytes
from moevement_ext.memory.window.name import HeldWindow, Window, WindowName
from moevement_ext.recover.verdict import Localized, decide_recovery
from tests.unit.memory.samples import tmpfs_directory
from tests.unit.recover.test_verdict import LAST, replacement, survivor

STAGES = 3


class Shape(NamedTuple):
    """One rank a stage, the middle one sends both ways."""

    window: int
    micro_batches: int
    record_bytes: int
    late: int
    """Tensors that a stage sends in an iteration until the window before is persisted, at most."""

    @property
    def sends(self) -> list[int]:
        return [self.micro_batches, 2 * self.micro_batches, self.micro_batches]

    def logged(self) -> list[Logged]:
        record = region_bytes(self.record_bytes)
        return [Logged(count * record, record) for count in self.sends]

    def rings(self) -> list[int]:
        """Sizes, for a lag of as many tensors as are late."""
        logged = self.logged()
        lag = self.late / max(self.sends)
        return [log_ring_bytes(own, logged[1], self.window, lag) for own in logged]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    micro_batches = draw(st.integers(1, 4))
    return Shape(
        draw(st.integers(1, 4)),
        micro_batches,
        draw(st.integers(1, 300)),
        draw(st.integers(0, 2 * micro_batches)),
    )


class Job:
    """What three stages log and persist, record by record, in real logs."""

    def __init__(self, shape: Shape, logs: list[UpstreamLog]) -> None:
        self.shape = shape
        self.logs = logs
        self.committed = 0
        self.sent = 0
        self.persisted: int | None = None

    def send(self) -> None:
        """Every stage sends its next tensor of this iteration, if it has one left."""
        iteration = self.committed + 1
        start = iteration - self.shape.window
        last_slot_is_copied = start >= 0 and start % self.shape.window == 0
        if last_slot_is_copied and self.sent == self.shape.late:
            self._persist(start)
        for log, sends in zip(self.logs, self.shape.sends, strict=True):
            if self.sent < sends:
                log.append(
                    iteration,
                    Direction.DOWN,
                    torch.ones(self.shape.record_bytes, dtype=torch.uint8),
                )
        self.sent += 1
        if self.sent == max(self.shape.sends):
            if last_slot_is_copied and self.sent == self.shape.late:
                self._persist(start)
            self.committed += 1
            self.sent = 0

    def _persist(self, start: int) -> None:
        self.persisted = start
        for log in self.logs:
            log.drop_until(start)

    def reports(self, lost: int, ahead: int | None) -> list[Report]:
        """What all ranks say after the death of one; another may be an update ahead."""
        windows = []
        if self.persisted is not None:
            window = Window(WindowName(self.persisted, 'plan'), self.shape.window)
            windows = [HeldWindow(window, owner) for owner in range(STAGES)]
        return [
            replacement(windows)
            if rank == lost
            else survivor(
                self.committed + (rank == ahead),
                first_logged=self.logs[rank].first_iteration or 1,
                windows=windows,
            )
            for rank in range(STAGES)
        ]

    def holds(self, stage: int, iteration: int) -> bool:
        keys = (LogKey(iteration, Direction.DOWN, k) for k in range(self.shape.sends[stage]))
        try:
            return all(self.logs[stage].read(key, 20.0) is not None for key in keys)
        except LogGap:
            return False


@contextmanager
def running(shape: Shape, sizes: list[int]) -> Iterator[tuple[Job, list[str]]]:
    complaints: list[str] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tmpfs_directory())
        logs = []
        for stage, size in enumerate(sizes):
            log = UpstreamLog(
                folder / f'log{stage}', size, torch.device('cpu'), 0.0, complaints.append
            )
            stack.callback(log.close)
            logs.append(log)
        yield Job(shape, logs), complaints


@given(shapes(), st.integers(0, 60), st.integers(0, STAGES - 1), st.none() | st.integers(0, 2))
def test_log_has_every_iteration_that_a_verdict_needs(
    shape: Shape, sends: int, lost: int, ahead: int | None
) -> None:
    with running(shape, shape.rings()) as (job, complaints):
        for _ in range(sends):
            job.send()
        assert complaints == []
        in_update = job.sent == 0 and ahead not in (None, lost)
        if in_update:  # every tensor of the next iteration has been sent
            for _ in range(max(shape.sends)):
                job.send()
            job.committed -= 1
            assert complaints == []
        reports = job.reports(lost, ahead if in_update else None)
        verdict = decide_recovery(reports, range(STAGES), (), LAST)
        if job.persisted is None:
            return
        assert isinstance(verdict, Localized)
        assert verdict.window is not None and verdict.window.start == job.persisted
        for stage in set(range(STAGES)) - verdict.stages:
            neighbours = {stage - 1, stage + 1} & verdict.stages
            for iteration in range(job.persisted + 1, verdict.target + 1):
                assert not neighbours or job.holds(stage, iteration)


@pytest.mark.parametrize('window', [1, 2, 5])
@pytest.mark.parametrize('late', [0, 3])
def test_smaller_log_is_insufficient(window: int, late: int) -> None:
    shape = Shape(window, 2, 64, late)
    record = shape.logged()[1].record_bytes
    smaller = [size - 2 * record for size in shape.rings()]
    with running(shape, smaller) as (job, complaints):
        for _ in range(10 * window * max(shape.sends)):
            job.send()
        assert any('is full' in text for text in complaints)
