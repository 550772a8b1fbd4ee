# SPDX-License-Identifier: Apache-2.0
"""Turns the sparse window into a dense state by replaying its iterations (paper section 3.3).

Slot 0 makes group 0 active, the other groups are frozen; the next iteration is replayed; slot 1
makes group 1 active; ... after the last slot every operator is active and the state is consistent.
"""

import time
from functools import cached_property
from typing import NamedTuple

from moevement_ext import faults
from moevement_ext.faults import Phase
from moevement_ext.memory.mapped_file import Bytes
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.slot import SlotContext, SlotHeader, decode_context
from moevement_ext.recover.sources import ArrivingWindow, VerifiedWindow
from moevement_ext.recover.trainer import Start, Trainer
from moevement_ext.recover.verification import Verification


class _Slot(NamedTuple):
    """One slot, decoded."""

    header: SlotHeader
    payload: Bytes
    context: SlotContext

    @property
    def start(self) -> Start:
        return Start(self.header.iteration, self.context.state)


class Conversion:
    """The conversion of a window to a dense state. Training thread only.

    Some slots of `source` may still arrive; `tier` says where this rank's part was. `replaying` is
    the current iteration of the replay, counted from 1; `load_s` and `replay_s` are the seconds of
    all loads, and of all replays.
    """

    def __init__(self, source: VerifiedWindow | ArrivingWindow, tier: str = '') -> None:
        self._source = source
        self.tier = tier
        self.window = source.name
        self.replaying: int | None = None
        self.load_s = 0.0
        self.replay_s = 0.0

    @cached_property
    def first(self) -> Start:
        """Start of the replay. Waits for the first slot."""
        return self._slot(0).start

    @cached_property
    def last(self) -> Start:
        """Start at which the state is dense. Waits for the last slot."""
        return self._slot(self._source.window - 1).start

    def file(self) -> WindowFile:
        """Wait for the whole window in this rank's memory."""
        return self._source.file()

    def let_go(self) -> None:
        """Drop the window, whose file may be deleted; `first` and `last` remain if read before."""
        del self._source

    def run(self, trainer: Trainer, verification: Verification) -> None:
        """Load slot after slot, and replay one iteration between each two.

        Collective over the stages that convert. `verification` receives the loss of
        each replayed iteration. Raises `RefusedWindow` if a slot is not available,
        or belongs to another model.
        """
        with trainer.replaying():
            slot = self._slot(0)
            self._load(slot, trainer)
            for index in range(1, self._source.window):
                following = self._slot(index)  # contains the reductions of the replayed iteration
                self._replay(slot, following, trainer)
                verification.replayed(
                    following.start.iteration, trainer.loss, following.context.loss
                )
                self._load(following, trainer)
                slot = following

    def _load(self, slot: _Slot, trainer: Trainer) -> None:
        began = time.perf_counter()
        faults.at_iteration(slot.header.iteration + 1)
        faults.point(Phase.LOAD)
        trainer.operators.load(slot.header, slot.payload, slot.context)
        trainer.auxiliary_state.restore(slot.context.state)
        self.load_s += time.perf_counter() - began

    def _replay(self, slot: _Slot, following: _Slot, trainer: Trainer) -> None:
        began = time.perf_counter()
        trainer.operators.freeze(slot.context.weights)
        faults.point(Phase.CONVERT)
        self.replaying = slot.header.iteration + 1
        with trainer.reduced(following.context.state):
            trainer.iterate(slot.header.iteration)
        self.replaying = None
        self.replay_s += time.perf_counter() - began

    def _slot(self, index: int) -> _Slot:
        header, payload = self._source.slot(index)
        return _Slot(header, payload, decode_context(header.context))
