# SPDX-License-Identifier: Apache-2.0
"""Work of a custom loop between two iterations, such as an evaluation or a save of its own.

A failure may cut it off when only some ranks have completed it. The recovery brings all ranks to
the iteration after which it was due, and runs there what some rank has not completed.
"""

from collections.abc import Callable, Sequence

import msgspec

from moevement_ext import faults
from moevement_ext.config import ConfigurationError
from moevement_ext.faults import Phase
from moevement_ext.membership.report import NOWHERE
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.recover.trainer import PlainLoop


class _Completed(msgspec.Struct, frozen=True, order=True):
    """What a rank has completed after its newest iteration."""

    iteration: int = NOWHERE
    completed: int = 0
    """Number of the functions due, in their order."""


_COMPLETED = msgspec.msgpack.Decoder(_Completed)


class AfterSteps(PlainLoop):
    """Functions that run after certain iterations, on all ranks together. Training thread only.

    `trust` is called after each function; it raises if its collectives may have been cut off.
    """

    def __init__(self, trust: Callable[[], None]) -> None:
        self._trust = trust
        self._steps: list[tuple[int, Callable[[int], object]]] = []
        self._progress = _Completed()

    def add(self, every: int, run: Callable[[int], object]) -> None:
        if every < 1:
            raise ConfigurationError(f'job.after_step: every={every} must be at least 1.')
        self._steps.append((every, run))

    def run(self, iteration: int) -> None:
        """Run the functions due after `iteration` that are not completed on this rank."""
        due = [run for every, run in self._steps if iteration % every == 0]
        if self._progress.iteration != iteration:
            self._progress = _Completed(iteration)
        for number in range(self._progress.completed, len(due)):
            faults.point(Phase.EVALUATE)
            due[number](iteration)
            self._trust()
            faults.point(Phase.EVALUATED)
            self._progress = _Completed(iteration, number + 1)

    def committed(self, iteration: int) -> None:
        self._progress = _Completed(iteration)

    def hand_over(self) -> bytes:
        return msgspec.msgpack.encode(self._progress)

    def enter(self, others: Sequence[bytes]) -> None:
        """Adopt the progress of the survivors: all may be lost before the recovery ends."""
        known = [_COMPLETED.decode(item) for item in others]
        newest = max(known).iteration
        self._progress = min(one for one in known if one.iteration == newest)

    def finish_post_step(
        self, target: int, others: Sequence[bytes], entry: LedgerEntry | None
    ) -> bool:
        known = [_COMPLETED.decode(item) for item in others]
        at_target = (one if one.iteration == target else _Completed(target) for one in known)
        self._progress = min(at_target)
        self.run(target)
        return True
