# SPDX-License-Identifier: Apache-2.0
"""A trainer of a few lines, whose arithmetic couples all operators, and windows of its state."""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np

from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.mapped import Bytes
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.slot import FORMAT_VERSION, Record, SlotContext, SlotHeader

Plan = Sequence[Sequence[str]]
"""Operators captured in full, by slot."""


def mixed(*parts: object) -> bytes:
    """Eight bytes that depend on every bit of `parts`."""
    return hashlib.sha256(repr(parts).encode()).digest()[:8]


class FakeTrainer:
    """Each operator has a master and a compute weight, a function of the master.

    An update of one depends on the weights of all, on the random state, and on what all ranks
    reduced, which needs the gradients of all operators: a frozen one gives none.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.master = {name: mixed('fresh', name) for name in names}
        self.weight = {name: self._cast(name) for name in names}
        self.random = b'seed'
        self.norm = b''
        self.frozen: frozenset[str] = frozenset()
        self._recorded: bytes | None = None
        self.operators = self.small_state = self
        self.log: list[tuple[str, object]] = []

    def _cast(self, name: str) -> bytes:
        return mixed('cast', self.master[name])[:2]

    def everything(self) -> tuple[object, ...]:
        """All that a later iteration can depend on."""
        return dict(self.master), dict(self.weight), self.random

    # Operators

    def load(self, header: SlotHeader, payload: Bytes, context: SlotContext) -> None:
        """Masters of some operators, compute weights of others."""
        for record in header.records:
            content = payload[record.offset : record.offset + record.nbytes].tobytes()
            if record.part == 'master':
                self.master[record.operator] = content
                self.weight[record.operator] = self._cast(record.operator)
            else:
                self.weight[record.operator] = content
        self.log.append(('load', header.slot))

    def freeze(self, names: Collection[str]) -> None:
        """Note which."""
        self.frozen = frozenset(names)
        self.log.append(('freeze', self.frozen))

    # Small state

    def now(self) -> bytes:
        """Random state, and what the step before reduced."""
        return msgspec.msgpack.encode((self.random, self.norm))

    def restore(self, state: bytes) -> None:
        """Inverse of `now`."""
        self.random, self.norm = msgspec.msgpack.decode(state, type=tuple[bytes, bytes])

    # Iterations

    def iterate(self, iteration: int) -> None:
        """One update of all that is not frozen."""
        weights = tuple(sorted(self.weight.items()))
        active = [name for name in self.names if name not in self.frozen]
        gradients = {name: mixed('gradient', name, weights, self.random) for name in active}
        computed = mixed('norm', sorted(gradients.items()))
        self.norm = computed if self._recorded is None else self._recorded
        for name in active:
            self.master[name] = mixed(self.master[name], gradients[name], self.norm)
            self.weight[name] = self._cast(name)
        self.random = mixed('random', self.random)

    @contextmanager
    def reduced(self, known: LedgerEntry | bytes) -> Iterator[None]:
        """With the norm that is recorded."""
        assert isinstance(known, bytes)  # a conversion asks no ledger
        _, self._recorded = msgspec.msgpack.decode(known, type=tuple[bytes, bytes])
        yield
        self._recorded = None

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Nothing is frozen at the end."""
        yield
        self.freeze(())


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
        light = [name for group in self._plan[slot + 1 :] for name in group]
        parts = [(name, 'master', trainer.master[name]) for name in full]
        parts += [(name, 'weight', trainer.weight[name]) for name in light]
        records, payload = [], b''
        for name, part, content in parts:
            records.append(
                Record(name, name, part, 'uint8', 0, len(content), len(payload), len(content))
            )
            payload += content
        context = msgspec.msgpack.encode(SlotContext(full, light, trainer.now()))
        header = SlotHeader(
            version=FORMAT_VERSION, run='run', topology='pp1', owner=0, start=self.name.start,
            window=self.window, slot=slot, iteration=self.name.start + slot, plan='plan',
            payload_bytes=len(payload), records=records, context=context,
        )  # fmt: skip
        self._slots.append((header, np.frombuffer(payload, np.uint8)))

    def slot(self, index: int) -> tuple[SlotHeader, Bytes]:
        """Header and payload."""
        return self._slots[index]

    def file(self) -> WindowFile:
        """There is none."""
        raise NotImplementedError
