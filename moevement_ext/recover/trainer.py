# SPDX-License-Identifier: Apache-2.0
"""Interface of a recoverable training loop.

The engine decides what is captured, kept, fetched and replayed, and when; a trainer implements
these operations for its model, optimizer, data and pipeline. `megatron.moevement` implements it for
Megatron-Core, `moevement_ext.job.torch_loop` for loops on plain torch.

Its parts are `Operators` (the tensors), `AuxiliaryState` (all other state of an iteration),
`Pipeline` (tensors between stages) and `Loop` (work between iterations). All methods are called by
the training thread.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from moevement_ext.capture.layout import Operators
from moevement_ext.membership.rank import Place
from moevement_ext.memory.budget import Logged
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import Direction
from moevement_ext.memory.window.settings import Layout, Seat
from moevement_ext.plan.replanning import TokenCounter
from moevement_ext.recover.reshard.index import Division


class Start(NamedTuple):
    """State that an iteration starts from."""

    iteration: int
    """Number of committed iterations."""
    state: bytes


class Committed(NamedTuple):
    """Result of a written update."""

    state: bytes
    entry: LedgerEntry
    """Data that a replay of the iteration needs and cannot compute on its own."""
    begins_window: bool = False
    """No window may go across this state, on all ranks."""


class Received(Protocol):
    """Tensors that a neighbouring stage sent in past iterations."""

    def take(self, iteration: int, sequence: int) -> torch.Tensor:
        """Return tensor number `sequence` (from 0) received in that iteration (from 1)."""


class Pipeline(Protocol):
    """Tensors between this rank's stage and its neighbours."""

    @property
    def neighbours(self) -> Mapping[Direction, int | None]:
        """Rank from which this one receives in each direction; None without one."""

    @property
    def logged(self) -> Logged:
        """Upper bound of the data logged in one iteration."""

    def receives(self, entry: LedgerEntry) -> Mapping[Direction, int]:
        """Return the number of tensors received in such an iteration, by direction."""

    def log_to(self, log: UpstreamLog | None) -> None:
        """Record all sends in `log` from now on."""

    def replaying(self, received: Mapping[Direction, Received]) -> AbstractContextManager[None]:
        """Within the context, receive from `received`, and send into the own log only."""


class AuxiliaryState(Protocol):
    """All non-tensor state that an iteration starts from, as bytes that only the trainer decodes.

    Random numbers, schedules, counters, positions in the data, loss scales, and values that the
    previous step reduced over all ranks.
    """

    @property
    def max_bytes(self) -> int:
        """Upper bound of the encoded size in this job."""

    def now(self) -> bytes:
        """Return the present state, encoded, without side effects."""

    def restore(self, state: bytes) -> None:
        """Restore the state, except for the position of the training data."""

    def move_data(self, state: bytes) -> None:
        """Move the training data to the position in `state`."""

    def set_counters(self, state: bytes, validation: bytes | None = None) -> None:
        """Set iteration and sample counters to those of `state`.

        `validation` is the auxiliary state with the validation data's position; None: `state`.
        """

    def count(self, iteration: int, samples: int | None, validation: int | None = None) -> None:
        """Set the committed iterations, and the consumed samples of training and validation.

        None leaves a number of samples unchanged.
        """


class Loop(Protocol):
    """Work between iterations: evaluation, dense checkpoints, re-entry of the training loop."""

    def start(self) -> None:
        """Called after set-up, when training begins at the counters' position."""

    def committed(self, iteration: int) -> None:
        """Called when `iteration` is committed on this rank, before the work that follows it."""

    def hand_over(self) -> bytes:
        """Return the data that other ranks need from this rank after a failure."""

    def leave(self) -> None:
        """Make the loop enterable again after an interruption at any point."""

    def enter(self, others: Sequence[bytes]) -> None:
        """Prepare to enter the loop at the counters' position; ranks are not connected yet.

        `others` are the survivors' results of `hand_over`.
        """

    def finish_post_step(
        self, target: int, others: Sequence[bytes], entry: LedgerEntry | None
    ) -> bool:
        """Complete the work left by some survivors after `target`; False if the loop ends there.

        Collective over all ranks, which are connected and at `target`, the newest committed
        iteration. `others` as in `enter`; `entry` is the ledger entry of `target`.
        """


class PlainLoop:
    """A `Loop` without any work between iterations."""

    def start(self) -> None: ...

    def committed(self, iteration: int) -> None: ...

    def hand_over(self) -> bytes:
        return b''

    def leave(self) -> None: ...

    def enter(self, others: Sequence[bytes]) -> None: ...

    def finish_post_step(
        self, target: int, others: Sequence[bytes], entry: LedgerEntry | None
    ) -> bool:
        return True


class Resharding(Protocol):
    """Names in every layout, and the auxiliary state of this one. Training thread."""

    def refuse(self, was: Layout) -> None:
        """Refuse an earlier layout whose state cannot be converted to this layout.

        Raises `RefusedWindow`, which names the setting that must not change.
        """

    def name_of(self, operator: str, tensor: str, seat: Seat) -> str:
        """Layout-independent name of a record's tensor on the rank at `seat`.

        The name includes the shard, unless `division_of` gives the place of the shard in
        the tensor.
        """

    def division_of(self, operator: str, part: str, tensor: str, owner: int | None) -> Division:
        """Division of a record's tensor, if the two layouts divide it differently.

        Called after `state_owners`. `owner` is a rank of the other layout; None: this rank.
        Raises `RefusedWindow` if the layouts divide a value that belongs to the whole
        shard, such as a scale.
        """

    def state_owners(self, seats: Mapping[int, Seat]) -> Collection[int]:
        """Owners whose auxiliary state is the source of this rank's; `seats` has all owners."""

    def auxiliary_state(self, states: Mapping[int, bytes]) -> bytes:
        """Merge the auxiliary states of `state_owners`; `RefusedWindow` if contradictory."""

    def kept(self, was: Layout) -> str:
        """Log text: which random number streams continue from layout `was` and which restart."""


class Trainer(Protocol):
    """Training loop of one rank, as seen by recovery."""

    @property
    def place(self) -> Place:
        """Place of this rank in the layout."""

    @property
    def iteration(self) -> int:
        """Number of committed iterations."""

    @property
    def last_iteration(self) -> int:
        """Iteration at which training ends."""

    @property
    def loss(self) -> float | None:
        """This rank's part of the newest loss, as far as the host has it without a device wait.

        None if this rank computes no part; a replay must compute the same number.
        """

    @property
    def operators(self) -> Operators: ...

    @property
    def auxiliary_state(self) -> AuxiliaryState:
        """The non-tensor state that an iteration starts from."""

    @property
    def pipeline(self) -> Pipeline: ...

    @property
    def loop(self) -> Loop:
        """Work between the iterations."""

    @property
    def tokens(self) -> TokenCounter:
        """Counter of the experts' load."""

    @property
    def resharding(self) -> Resharding | None:
        """Conversion of the state to another layout; None if unsupported."""

    def begin_iteration(self, iteration: int) -> bytes:
        """Begin the iteration after `iteration`: record the buffers that it will accumulate into.

        Returns the auxiliary state that the iteration starts from.
        """

    def undo_broken_iteration(self, state: bytes, began: bool) -> None:
        """Undo the changes of an interrupted iteration, which followed auxiliary state `state`.

        `began`: the iteration had begun; otherwise only the auxiliary state may have changed.
        """

    def around_update(
        self, wait: Callable[[], None], writing: Callable[[], None], written: Callable[[bool], None]
    ) -> None:
        """Register callbacks for each update.

        `wait`: before the first write to captured state; waits until the write is allowed.
        `writing`: right before the optimizer writes; the gradients are complete. `written`: after
        the write, with whether the update was skipped.
        """

    def iterate(self, iteration: int) -> Any:
        """Run the iteration after `iteration`: forward, backward, update."""

    def record(self, iteration: int, skipped: bool) -> Committed:
        """Return the result of the update to `iteration`, which was just written or skipped."""

    def replaying(self) -> AbstractContextManager[None]:
        """Within the context, iterations are replayed; at its end no operator is frozen."""

    def reduced(self, known: LedgerEntry | bytes) -> AbstractContextManager[None]:
        """Within the context, take values reduced over all ranks from `known` instead.

        `known` is the ledger entry of the iteration to run, or the auxiliary state after it.
        """
