# SPDX-License-Identifier: Apache-2.0
"""Windows in plain memory, captured from a fake trainer."""

from collections.abc import Sequence

import msgspec
import numpy as np

from moevement_ext.memory.mapped import Bytes
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.slot import FORMAT_VERSION, Record, SlotContext, SlotHeader
from tests.unit.recover.fake_trainer import FakeTrainer

Plan = Sequence[Sequence[str]]
"""Operators captured in full, by slot."""


class FakeWindow:
    """A window in plain memory, captured from a trainer as it goes on."""

    def __init__(self, start: int, plan: Plan) -> None:
        self.name = WindowName(start, 'plan')
        self.window = len(plan)
        self._plan = plan
        self._slots: list[tuple[SlotHeader, Bytes]] = []

    def capture(self, trainer: FakeTrainer) -> None:
        """The next slot: some operators in full, those not yet captured by their weights."""
        slot = len(self._slots)
        full = list(self._plan[slot])
        weights = [name for group in self._plan[slot + 1 :] for name in group]
        slices = trainer.operators.slices
        records, payload = [], b''
        for part in (*(slices[n].full[0] for n in full), *(slices[n].weights[0] for n in weights)):
            content = part.source.numpy().tobytes()
            place = (0, len(content), len(payload), len(content))
            records.append(Record(part.operator, part.tensor, part.part, 'uint8', *place))
            payload += content
        context = SlotContext(full, weights, trainer.auxiliary_state.now())
        header = SlotHeader(
            version=FORMAT_VERSION,
            run='run',
            topology='pp1',
            owner=0,
            start=self.name.start,
            window=self.window,
            slot=slot,
            iteration=self.name.start + slot,
            plan='plan',
            payload_bytes=len(payload),
            records=records,
            context=msgspec.msgpack.encode(context),
        )
        self._slots.append((header, np.frombuffer(payload, np.uint8)))

    def slot(self, index: int) -> tuple[SlotHeader, Bytes]:
        return self._slots[index]

    def file(self) -> WindowFile:
        raise NotImplementedError
