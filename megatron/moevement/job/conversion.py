# SPDX-License-Identifier: Apache-2.0
"""Turns the sparse window into a dense state by replaying its iterations (paper section 3.3).

Slot 0 makes group 0 active, the others are frozen; the next iteration is replayed; slot 1 makes
group 1 active; ... after the last slot every operator is active and the state is consistent. All
stages replay together here, on upstream's own `train_step`.
"""

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

from megatron.moevement.state import iteration_state
from megatron.moevement.state.frozen import FrozenOperators
from megatron.moevement.state.global_scalars import ScalarRecorder
from megatron.moevement.state.iteration_state import IterationState
from megatron.moevement.state.slices import SlotLoader
from moevement_ext import faults
from moevement_ext.faults import Phase
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Bytes
from moevement_ext.memory.window.slot import SlotContext, SlotHeader, decode_context
from moevement_ext.recover.sources import SlotSource


class _Slot(NamedTuple):
    """One slot, decoded."""

    header: SlotHeader
    payload: Bytes
    context: SlotContext
    state: IterationState


class Conversion:
    """A window on its way to a dense state. Training thread only.

    Args:
        source: of its verified slots, which may still be on their way.
    """

    def __init__(self, source: SlotSource) -> None:
        self._source = source
        self.window = source.name
        self.load_s = 0.0
        self.replay_s = 0.0

    @cached_property
    def first(self) -> IterationState:
        """Where the replay starts. Waits for the first slot."""
        return self._slot(0).state

    @cached_property
    def last(self) -> IterationState:
        """Where the state is dense. Waits for the last slot."""
        return self._slot(self._source.window - 1).state

    def file(self) -> WindowFile:
        """The whole window in this rank's memory. Waits until it is there."""
        return self._source.file()

    def run(
        self,
        loader: SlotLoader,
        frozen: FrozenOperators,
        recorder: ScalarRecorder,
        restore: Callable[[IterationState], None],
        replay: Callable[[int], Any],
    ) -> None:
        """Load slot after slot, replaying one iteration between each two.

        Args:
            loader: puts a slot into place.
            frozen: freezes operators.
            recorder: plays the recorded scalars back.
            restore: puts RNG, scheduler, scalers and counters into place.
            replay: upstream's `train_step` for the iteration after the given one.
        """
        with frozen.replaying():
            slot = self._slot(0)
            self._load(slot, loader, restore)
            for index in range(1, self._source.window):
                following = self._slot(index)  # knows what the replayed iteration reduced
                self._replay(slot, following, frozen, recorder, replay)
                self._load(following, loader, restore)
                slot = following
        recorder.put_back(self.last.scalars)

    def _load(
        self, slot: _Slot, loader: SlotLoader, restore: Callable[[IterationState], None]
    ) -> None:
        began = time.perf_counter()
        faults.at_iteration(slot.state.iteration + 1)
        faults.point(Phase.LOAD)
        loader.load(slot.header, slot.payload, slot.context)
        restore(slot.state)
        self.load_s += time.perf_counter() - began

    def _replay(
        self,
        slot: _Slot,
        following: _Slot,
        frozen: FrozenOperators,
        recorder: ScalarRecorder,
        replay: Callable[[int], Any],
    ) -> None:
        began = time.perf_counter()
        frozen.freeze(slot.context.light)
        faults.point(Phase.CONVERT)
        with recorder.replaying(following.state.scalars):
            replay(slot.state.iteration)
        self.replay_s += time.perf_counter() - began

    def _slot(self, index: int) -> _Slot:
        header, payload = self._source.slot(index)
        context = decode_context(header.context)
        return _Slot(header, payload, context, iteration_state.decode(context.state))
