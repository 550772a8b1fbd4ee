# SPDX-License-Identifier: Apache-2.0
"""A rank that trains on a CPU or a GPU, and is captured, shared by the tests of both."""

import queue
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from moevement_ext.capture.layout import OperatorSlices, TensorSlice
from moevement_ext.events import EventLog
from moevement_ext.memory.device import pin
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import Agreed, RankIdentity, WindowName
from moevement_ext.memory.window.slot import SlotHeader, decode_context
from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.plan.replanning import Cycle
from moevement_ext.protect.checkpointer import SparseCheckpointer
from moevement_ext.protect.expert_ledger import ExpertLedger
from moevement_ext.protect.lifecycle import WindowLifecycle
from moevement_ext.protect.statistics import CaptureStatistics
from tests.unit.memory.samples import PLAN, RUN, TOPOLOGY

W = 3
RANK = 2
CAPACITY = 2**17
"""Of a window file, beside its tensors."""
TENSORS = 12
"""As large as `elements` of float32, at most: those of a window."""
CPU = torch.device('cpu')
DEADLINE_S = 30.0
"""How long a test waits for something that comes at once."""

NAMES = ('expert0', 'expert1', 'router')
SCHEDULE = Cycle(origin=0, plan=WindowPlan(tuple((name,) for name in NAMES)), digest=PLAN)


class Training:
    """A rank that trains, and is captured by real parts: tmpfs files, a replicator, threads.

    After `iteration` iterations every tensor is full of `iteration`; forward overwrites buffers.
    """

    def __init__(
        self,
        shm: Path,
        schedule: Cycle = SCHEDULE,
        max_wait_s: float = DEADLINE_S,
        device: torch.device = CPU,
        elements: int = 100,
        experts: ExpertLedger | None = None,
    ) -> None:
        self._stopping = False
        self._device, self._elements = device, elements
        self.iteration = 0
        self.updated: list[torch.Tensor] = []
        self.buffer = torch.zeros(8, device=device)
        operators = {name: self._operator(name) for name in NAMES}
        self.store = NodeStore(shm, 'run1', 'node0')
        self.windows = OwnerWindows(self.store, RANK, RANK, CAPACITY + TENSORS * 4 * elements)
        if device.type == 'cuda':
            for file in self.windows.files():
                pin(file)
        self.events = EventLog(None, RANK)
        self.reported: queue.Queue[WindowName] = queue.Queue()
        self.persisting = True
        self.agreed = Agreed()
        self.lifecycle = WindowLifecycle(
            RANK,
            self.windows,
            {},
            self._tracker,
            lambda window: None,
            CaptureStatistics(self.events),
            max_wait_s,
        )
        self.checkpointer = SparseCheckpointer(
            RankIdentity(RUN, TOPOLOGY, RANK),
            operators,
            device,
            self.lifecycle,
            schedule,
            experts,
        )

    def _tracker(self, agreed: Callable[[Agreed], None]) -> 'Training':
        """A tracker of this rank alone: what it reports is persisted, unless others lag behind."""
        return self

    def _operator(self, name: str) -> OperatorSlices:
        def part(kind: str, dtype: torch.dtype = torch.float32) -> TensorSlice:
            self.updated.append(torch.zeros(self._elements, dtype=dtype, device=self._device))
            return TensorSlice(name, f'{name}.weight', kind, 0, self._elements, self.updated[-1])

        full = [part('master'), part('exp_avg')]
        if name == 'router':
            full.append(TensorSlice(name, 'counts', 'buffer', 0, 8, self.buffer, volatile=True))
        return OperatorSlices(tuple(full), (part('weight', torch.bfloat16),))

    def report(self, window: WindowName) -> None:
        if self.persisting:
            self.agree(window)
        self.reported.put(window)

    def agree(self, persisted: WindowName | None) -> None:
        self.agreed = Agreed(persisted).with_given_up(self.agreed.given_up)
        self.lifecycle.agreed(self.agreed)

    def give_up(self, starts: Iterable[int]) -> None:
        self.agreed = self.agreed.with_given_up(starts)
        self.lifecycle.agreed(self.agreed)

    def withdraw_after(self, window: WindowName) -> None:
        pass

    def step(self) -> None:
        """One iteration, in the order in which a trainer calls."""
        self.checkpointer.begin(self.iteration, b'state %d' % self.iteration)
        self.buffer.fill_(-1)  # forward
        self.checkpointer.before_update()
        self.iteration += 1
        for tensor in (*self.updated, self.buffer):
            tensor.fill_(self.iteration)

    def run_until(self, iteration: int) -> None:
        """Train; replication and persistence keep pace with the windows."""
        while self.iteration < iteration:
            self.step()
            self.checkpointer.drain()
            for window in self._complete():
                if window not in self.heard:
                    self.heard.append(self.reported.get(timeout=DEADLINE_S))

    @property
    def heard(self) -> list[WindowName]:
        """Windows that were reported complete, in order."""
        return self.__dict__.setdefault('_heard', [])

    def _complete(self) -> list[WindowName]:
        return [window.name for window in reversed(self.windows.committed())]

    def committed(self) -> list[int]:
        return [name.start for name in self._complete()]

    def fail_copy_of(self, iteration: int) -> None:
        """Train until `iteration`, whose capture finds a tensor that has become too short."""
        self.run_until(iteration)
        *_, last = self.updated
        last.resize_(99)
        self.step()
        last.resize_(100).fill_(self.iteration)

    def stop(self) -> None:
        if not self._stopping:  # the tracker, too, is stopped
            self._stopping = True
            self.checkpointer.stop()
            self.lifecycle.stop()
            self.store.close()


def verified(
    training: Training, start: int, plan: str = PLAN
) -> tuple[WindowFile, list[SlotHeader]]:
    """A committed window as a process that comes later reads it."""
    name = WindowName(start, plan)
    held = training.windows.file(name)
    assert held is not None
    file = WindowFile.open(held.path)
    return file, file.verify(Expected(RUN, TOPOLOGY, RANK, name))


def assert_contents(training: Training, start: int) -> None:
    """Every tensor of slot i is that of iteration start + i, whatever training did since."""
    file, headers = verified(training, start)
    assert [header.iteration for header in headers] == [*range(start, start + W)]
    for header in headers:
        context = decode_context(header.context)
        assert context.full == [NAMES[header.slot]]
        assert context.weights == [*NAMES[header.slot + 1 :]]
        assert context.state == b'state %d' % header.iteration
        assert {record.operator for record in header.records} == {*context.full, *context.weights}
        payload = torch.from_numpy(file.payload(header.slot).copy())
        for record in header.records:
            stored = payload[record.offset : record.offset + record.nbytes]
            assert (stored.view(getattr(torch, record.dtype)) == header.iteration).all()
