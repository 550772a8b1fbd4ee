# SPDX-License-Identifier: Apache-2.0
"""Interface of a recoverable training loop.

The engine decides what is captured, kept, fetched, replayed and when; a trainer knows how its own
model, optimizer, data and pipeline do it. `megatron.moevement` implements it for Megatron-Core,
`moevement_ext.job.torch_loop` for loops on plain torch.

Its parts are `Operators` (the tensors), `AuxiliaryState` (all else that an iteration starts from),
`Pipeline` (what passes between stages) and `Loop` (what is around the iterations). The training
thread calls everything.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from moevement_ext.capture.operators import Operators
from moevement_ext.capture.relaying import Relaying
from moevement_ext.membership.place import Place
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.sizing import Logged
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import Direction
from moevement_ext.plan.replanning import TokenCounter


class Start(NamedTuple):
    """Where an iteration starts."""

    iteration: int
    """Number of committed iterations."""
    state: bytes
    """The auxiliary state after them."""


class Committed(NamedTuple):
    """What an update that is written leaves."""

    state: bytes
    """The auxiliary state that the next iteration starts from."""
    entry: LedgerEntry
    """What a replay of the iteration needs that it cannot compute alone."""


class Received(Protocol):
    """What the stage before sent down, or the stage after sent up, in iterations gone by."""

    def take(self, iteration: int, sequence: int) -> torch.Tensor:
        """What was received as number `sequence` (from 0) of that iteration (from 1)."""


class Pipeline(Protocol):
    """What passes between this rank's stage and its neighbours."""

    @property
    def neighbours(self) -> Mapping[Direction, int | None]:
        """The rank from which this one receives in each direction, None if it does not."""

    @property
    def logged(self) -> Logged:
        """What is logged in one iteration, at most."""

    def receives(self, entry: LedgerEntry) -> Mapping[Direction, int]:
        """How many tensors it receives in such an iteration."""

    def log_to(self, log: UpstreamLog | None) -> None:
        """Whatever is sent is noted there from now on."""

    def replaying(self, received: Mapping[Direction, Received]) -> AbstractContextManager[None]:
        """Within it, receive from these and send nothing but into the own log."""


class AuxiliaryState(Protocol):
    """All but tensors that an iteration starts from, as bytes that only the trainer reads.

    Random numbers, schedules, counters, positions in the data, loss scales, and what the step
    before reduced over all ranks.
    """

    @property
    def max_bytes(self) -> int:
        """Upper bound of its size in this job."""

    def now(self) -> bytes:
        """The present state, encoded; nothing changes by reading it."""

    def restore(self, state: bytes) -> None:
        """Put it back, all of it but the position of the training data."""

    def move_data(self, state: bytes) -> None:
        """Training data go on from where `state` was."""

    def set_counters(self, state: bytes, validation: bytes | None = None) -> None:
        """Iteration and samples are those of `state`.

        Args:
            state: auxiliary state.
            validation: auxiliary state that validation data go on from; None: `state`.
        """

    def count(self, iteration: int, samples: int | None) -> None:
        """So many iterations are committed, which consumed so many samples; None: as counted."""


class Loop(Protocol):
    """What is around the iterations: evaluation, dense checkpoints, a loop to be entered again."""

    def start(self) -> None:
        """Set-up is over, and training begins where the counters are."""

    def committed(self, iteration: int) -> None:
        """`iteration` is committed on this rank; what follows it is not done yet."""

    def hand_over(self) -> bytes:
        """What others need to know of this rank after a failure."""

    def leave(self) -> None:
        """Make it enterable again, wherever it was cut off."""

    def enter(self, others: Sequence[bytes]) -> None:
        """It is about to be entered where the counters are; connections lead nowhere yet.

        Args:
            others: what `hand_over` returned on each survivor.
        """

    def finish_post_step(
        self, target: int, others: Sequence[bytes], entry: LedgerEntry | None
    ) -> bool:
        """Do what not all survivors had done after `target`; False if the loop ends there.

        Collective over all ranks, which are connected and at `target`.

        Args:
            target: the newest committed iteration.
            others: as of `enter`.
            entry: what the ledger has of `target`.
        """


class PlainLoop:
    """A `Loop` that does nothing but iterations."""

    def start(self) -> None:
        """There is nothing to note."""

    def committed(self, iteration: int) -> None:
        """Nothing follows an iteration."""

    def hand_over(self) -> bytes:
        """There is nothing to know."""
        return b''

    def leave(self) -> None:
        """It can be entered wherever it was cut off."""

    def enter(self, others: Sequence[bytes]) -> None:
        """It goes by the counters alone."""

    def finish_post_step(
        self, target: int, others: Sequence[bytes], entry: LedgerEntry | None
    ) -> bool:
        """Nothing follows an iteration; training goes on."""
        return True


class Trainer(Protocol):
    """A training loop of one rank, as recovery sees it."""

    @property
    def place(self) -> Place:
        """In the layout."""

    @property
    def iteration(self) -> int:
        """Committed iterations."""

    @property
    def last_iteration(self) -> int:
        """At which training ends."""

    @property
    def loss(self) -> float | None:
        """The newest iteration's, as far as the host knows it without waiting.

        Whatever of it this rank computes itself, or None: a replay must come to the same number.
        """

    @property
    def operators(self) -> Operators:
        """The state that is captured."""

    @property
    def auxiliary_state(self) -> AuxiliaryState:
        """All else that an iteration starts from."""

    @property
    def pipeline(self) -> Pipeline:
        """To the neighbours."""

    @property
    def loop(self) -> Loop:
        """What is around the iterations."""

    @property
    def tokens(self) -> TokenCounter:
        """The load of the experts."""

    @property
    def relaying(self) -> Relaying | None:
        """How its state moves to another layout, None if it cannot."""

    def begin_iteration(self, iteration: int) -> bytes:
        """The iteration after `iteration` begins: note what it will accumulate into.

        Returns:
            The auxiliary state it starts from.
        """

    def undo_broken_iteration(self, state: bytes, began: bool) -> None:
        """Put back what the iteration after `state` has changed before it was cut off.

        Args:
            state: auxiliary state before it.
            began: it had begun; else only the auxiliary state may have changed.
        """

    def around_update(
        self,
        wait: Callable[[], None],
        writing: Callable[[], None],
        written: Callable[[bool], None],
    ) -> None:
        """Have each update call these.

        Args:
            wait: before the first write to captured state; waits until the write is allowed.
            writing: right before the optimizer writes; the gradients are complete.
            written: after the write, with whether the update was skipped.
        """

    def iterate(self, iteration: int) -> Any:
        """Run the iteration after `iteration`: forward, backward, update."""

    def record(self, iteration: int, skipped: bool) -> Committed:
        """What the update that led to `iteration` leaves; it was just written, or skipped."""

    def replaying(self) -> AbstractContextManager[None]:
        """Within it iterations are replayed; at its end nothing is frozen."""

    def reduced(self, known: LedgerEntry | bytes) -> AbstractContextManager[None]:
        """Within it, what all ranks reduce together is taken from there instead.

        Args:
            known: what is recorded of the iteration to run, or the auxiliary state after it.
        """
