# SPDX-License-Identifier: Apache-2.0
"""Turns the sparse window into a dense state by replaying its iterations (paper section 3.3).

Slot 0 makes group 0 active, the others are frozen; the next iteration is replayed; slot 1 makes
group 1 active; ... after the last slot every operator is active and the state is consistent. All
stages replay together here, on upstream's own `train_step`.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron.moevement import iteration_state
from megatron.moevement.frozen import FrozenOperators
from megatron.moevement.global_scalars import ScalarRecorder
from megatron.moevement.iteration_state import IterationState
from megatron.moevement.slices import SlotLoader
from moevement_ext.memory.slot import SlotHeader, WindowName
from moevement_ext.memory.window_file import WindowFile
from moevement_ext.recover.context import decode_context
from moevement_ext.testing import faults


class Conversion:
    """A verified window on its way to a dense state. Training thread only.

    Args:
        file: the window of this rank.
        headers: its verified headers, slot 0 first.
    """

    def __init__(self, file: WindowFile, headers: Sequence[SlotHeader]) -> None:
        self.file = file
        self.window = WindowName(headers[0].start, headers[0].plan)
        self._headers = headers
        self._contexts = [decode_context(header.context) for header in headers]
        self._states = [iteration_state.decode(context.state) for context in self._contexts]
        self.load_s = 0.0
        self.replay_s = 0.0

    @property
    def first(self) -> IterationState:
        """Where the replay starts."""
        return self._states[0]

    @property
    def last(self) -> IterationState:
        """Where the state is dense."""
        return self._states[-1]

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
            for slot, state in enumerate(self._states):
                began = time.perf_counter()
                faults.at_iteration(state.iteration + 1)
                faults.point('load')
                self.load_slot(slot, loader)
                restore(state)
                self.load_s += time.perf_counter() - began
                if slot + 1 < len(self._states):
                    began = time.perf_counter()
                    frozen.freeze(self._contexts[slot].light)
                    faults.point('convert')
                    with recorder.replaying(self._states[slot + 1].scalars):
                        replay(state.iteration)
                    self.replay_s += time.perf_counter() - began
        recorder.put_back(self.last.scalars)

    def load_slot(self, slot: int, loader: SlotLoader) -> None:
        """Put one slot's tensors into place."""
        loader.load(self._headers[slot], self.file.payload(slot), self._contexts[slot])
