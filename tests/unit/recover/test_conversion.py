# SPDX-License-Identifier: Apache-2.0
"""From sparse slots to a dense state, for every plan of a few operators, without processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest

from moevement_ext.memory.mapped_file import Bytes
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.slot import SlotContext, SlotHeader
from moevement_ext.recover.conversion import Conversion
from moevement_ext.recover.verification import Verification
from tests.unit.memory.samples import make_header
from tests.unit.recover.fake_trainer import FakeTrainer

Plan = Sequence[Sequence[str]]
"""Operators captured in full, by slot."""
NAMES = ('a', 'b', 'c', 'd')
START = 5


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
            records.append(part.record(len(payload)))
            payload += part.source.numpy().tobytes()
        state = trainer.auxiliary_state.now()
        context = SlotContext(full=full, weights=weights, state=state)
        header = msgspec.structs.replace(
            make_header(slot, self.name.start, 'plan', window=self.window),
            payload_bytes=len(payload),
            records=records,
            context=msgspec.msgpack.encode(context),
        )
        self._slots.append((header, np.frombuffer(payload, np.uint8)))

    def slot(self, index: int) -> tuple[SlotHeader, Bytes]:
        return self._slots[index]

    def file(self) -> WindowFile:
        raise NotImplementedError


def plans(names: tuple[str, ...]) -> Iterator[Plan]:
    """All ordered partitions: which operators in which slot."""
    if not names:
        yield ()
        return
    for number in range(1, 2 ** len(names)):
        first = tuple(name for bit, name in enumerate(names) if number >> bit & 1)
        rest = tuple(name for name in names if name not in first)
        for others in plans(rest):
            yield (first, *others)


ALL_PLANS = list(plans(NAMES))


def captured(plan: Plan) -> tuple[FakeWindow, FakeTrainer]:
    """A window of a job that trained, and the trainer where its conversion has to come."""
    trainer, window = FakeTrainer(NAMES), FakeWindow(START, plan)
    for iteration in range(START + len(plan) - 1):
        if iteration >= START:
            window.capture(trainer)
        trainer.iterate(iteration)
    window.capture(trainer)
    return window, trainer


def converted(plan: Plan, breaking: Callable[[FakeTrainer], None] = lambda new: None) -> bool:
    """Whether a new process comes to the state of the job that was lost, and stays with it."""
    window, lost = captured(plan)
    new = FakeTrainer(NAMES)
    new.auxiliary_state.random = b'of another process'
    breaking(new)
    conversion = Conversion(window)
    conversion.run(new, Verification.of_nothing())
    end = START + len(plan) - 1
    assert (conversion.first.iteration, conversion.last.iteration) == (START, end)
    same = new.everything() == lost.everything()
    for iteration in range(end, end + 4) if same else ():
        lost.iterate(iteration)
        new.iterate(iteration)
        assert new.everything() == lost.everything()
    return same


@pytest.mark.parametrize('plan', ALL_PLANS, ids=lambda plan: '-'.join(map(''.join, plan)))
def test_every_plan_leads_to_the_state_that_was_lost_and_the_same_iterations(plan: Plan) -> None:
    assert converted(plan)


def test_operators_without_full_state_are_frozen_in_the_replay() -> None:
    window, _ = captured((('a',), ('b', 'c'), ('d',)))
    new = FakeTrainer(NAMES)
    Conversion(window).run(new, Verification.of_nothing())
    assert new.operators.log == [
        ('load', 0),
        ('freeze', frozenset('bcd')),
        ('load', 1),
        ('freeze', frozenset('d')),
        ('load', 2),
        ('freeze', frozenset()),
    ]


SEVERAL = [plan for plan in ALL_PLANS if len(plan) > 1]


def restore_nothing(new: FakeTrainer) -> None:
    new.auxiliary_state.restore = lambda state: None  # type: ignore[method-assign]


def reduce_anew(new: FakeTrainer) -> None:
    new.reduced = lambda known: nullcontext()  # type: ignore[method-assign]


def load_no_weights(new: FakeTrainer) -> None:
    load = new.operators.load

    def without_weights(header, payload, context):  # type: ignore[no-untyped-def]
        header.records = [record for record in header.records if record.part == 'master']
        load(header, payload, context)

    new.operators.load = without_weights  # type: ignore[method-assign]


@pytest.mark.parametrize('breaking', [restore_nothing, reduce_anew, load_no_weights])
def test_conversion_without_a_step_fails(
    breaking: Callable[[FakeTrainer], None],
) -> None:
    assert not any(converted(plan, breaking) for plan in SEVERAL)
