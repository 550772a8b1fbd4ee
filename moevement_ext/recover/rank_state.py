# SPDX-License-Identifier: Apache-2.0
"""State machine of a rank's part of the training state.

Between failures a rank holds the whole state of an iteration, or can restore it, or has none
(invariants I1 and I2). Only this module changes the kind of state, its iteration state, the
committed iteration and the pending recovery; the rank's report is derived from it. The machine has
no side effects: the training thread of the rank drives it and acts.

    Whole --begins--> Running --updating--> Torn --stepped--> Whole
    Whole, Running --decided: keep--> the same, pending; Running --undone--> Whole
    any --decided: replay, copy--> Rebuilding --reached, stepped--> Rebuilding --rebuilt--> Whole
    pending and Rebuilding, Whole --goes on--> the same, with the newer verdict
    pending and Whole at the target --resumed--> Whole
"""

from dataclasses import dataclass

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.membership.report import NOWHERE
from moevement_ext.recover.trainer import Start
from moevement_ext.recover.verdict import Localized


class ForbiddenTransition(SparseCheckpointError):
    """An event that is impossible in the current state; a defect of this package."""


@dataclass(frozen=True)
class Whole:
    """The state of an iteration is complete; the next one starts from it."""

    state: Start


@dataclass(frozen=True)
class Running:
    """The iteration after `state` accumulates gradients; `state` can be rolled back to."""

    state: Start


@dataclass(frozen=True)
class Torn:
    """The optimizer is writing parameters: neither the old nor the new state is complete."""


@dataclass(frozen=True)
class Rebuilding:
    """The state is being loaded, replayed or copied."""

    reached: Start | None = None
    """Progress of a replay; not reliable until the replay is complete."""


type Position = Whole | Running | Torn | Rebuilding


class RankState:
    """The training state of one rank. Training thread only.

    `position` is the kind of state that the rank holds; a new rank without `state` must rebuild it.
    `committed` is the newest iteration known to be committed on any rank, `NOWHERE` if none is;
    `pending` the verdict to carry out before the next iteration, after a failure.
    """

    def __init__(self, committed: int, state: Start | None = None) -> None:
        self.position: Position = Rebuilding() if state is None else Whole(state)
        self.committed = committed
        self.pending: Localized | None = None
        if state is not None and state.iteration != committed:
            raise self._forbidden(f'starts at {state.iteration}')

    # Queries

    @property
    def clean_at(self) -> int:
        """Iteration whose whole state the rank has or can roll back to; `NOWHERE` if none."""
        kept = self.kept
        return NOWHERE if kept is None else kept.iteration

    @property
    def kept(self) -> Start | None:
        """Auxiliary state of `clean_at`'s iteration."""
        return self.position.state if isinstance(self.position, Whole | Running) else None

    @property
    def torn(self) -> bool:
        """True while the optimizer writes, outside a replay."""
        return isinstance(self.position, Torn)

    @property
    def rebuilding(self) -> bool:
        """True while the state is incomplete; iterations computed meanwhile commit nothing."""
        return isinstance(self.position, Rebuilding)

    # An iteration

    def begins(self, state: Start) -> None:
        match self.position:
            case Rebuilding():
                pass  # a replaying stage
            case Whole(before) if before.iteration == state.iteration and self.pending is None:
                self.position = Running(state)
            case _:
                raise self._forbidden(f'begins after {state.iteration}')

    def updating(self) -> None:
        """Record that the optimizer begins to write, perhaps repeatedly in this iteration."""
        if self.rebuilding:
            self.position = Rebuilding()
        elif self.pending is None:
            self.position = Torn()
        else:
            raise self._forbidden('updates')

    def stepped(self, state: Start) -> None:
        """Record that the optimizer has written, or skipped the update, with `state` as result."""
        match self.position:
            case Rebuilding():
                self.reached(state)
            case Torn() | Running() if self._follows(state):
                self.position = Whole(state)
                self.committed = state.iteration
            case _:
                raise self._forbidden(f'stepped to {state.iteration}')

    def _follows(self, state: Start) -> bool:
        """Allow the same iteration again: a loop may step twice, which its caller refuses."""
        return self.pending is None and state.iteration - self.committed in (0, 1)

    # A failure

    def decided(self, verdict: Localized, rank: int) -> None:
        """Apply the verdict of a rendezvous; `rank` is this rank."""
        if rank in verdict.ranks or rank in verdict.copies:
            self.position = Rebuilding()
        elif self.clean_at != verdict.target:
            raise self._forbidden(f'is to keep its state of iteration {verdict.target}')
        self.committed = verdict.target
        self.pending = verdict

    def goes_on(self, verdict: Localized) -> None:
        """Apply the verdict of a later rendezvous during this rank's replay, which continues."""
        match self.position:
            case Rebuilding() | Whole() if self.pending and verdict.target == self.pending.target:
                self.pending = verdict
            case _:
                raise self._forbidden(f'goes on to iteration {verdict.target}')

    def undone(self) -> None:
        match self.position:
            case Whole(state) | Running(state):
                self.position = Whole(state)
            case _:
                raise self._forbidden('rolls back to a state that it does not have')

    def reached(self, state: Start) -> None:
        match self.position:
            case Rebuilding(before) if before is None or before.iteration <= state.iteration:
                self.position = Rebuilding(state)
            case _:
                raise self._forbidden(f'reaches {state.iteration}')

    def rebuilt(self) -> None:
        """Record that the rebuilt state is complete: that of the newest committed iteration."""
        match self.position:
            case Rebuilding(state) if state is not None and state.iteration == self.committed:
                self.position = Whole(state)
            case _:
                raise self._forbidden('takes for rebuilt what is not')

    def resumed(self) -> None:
        """Record that all ranks are at the target and connected; training continues."""
        match self.position:
            case Whole(state) if self.pending and state.iteration == self.pending.target:
                self.pending = None
            case _:
                raise self._forbidden('resumes')

    def _forbidden(self, what: str) -> ForbiddenTransition:
        return ForbiddenTransition(
            f'A rank that is {self.position}, knows iteration {self.committed} to be committed and '
            f'has {"a" if self.pending else "no"} recovery to carry out {what}. This is a defect '
            'of sparse checkpointing; please report it with the log.'
        )
