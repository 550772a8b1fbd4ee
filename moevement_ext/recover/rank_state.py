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

`S` is the auxiliary state that travels with an iteration (random numbers, schedules, positions).
"""

from dataclasses import dataclass
from typing import Protocol

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.membership.report import NOWHERE
from moevement_ext.recover.verdict import Localized


class IterationStateLike(Protocol):
    """What the machine knows of an iteration state."""

    @property
    def iteration(self) -> int:
        """Number of committed iterations it comes after."""


class ForbiddenTransition(SparseCheckpointError):
    """Something happened that cannot happen to a rank in this state; a defect of this package."""


@dataclass(frozen=True)
class Whole[S: IterationStateLike]:
    """The state of an iteration is complete; the next one starts from it."""

    state: S


@dataclass(frozen=True)
class Running[S: IterationStateLike]:
    """The iteration after `state` accumulates gradients; `state` can be rolled back to."""

    state: S


@dataclass(frozen=True)
class Torn:
    """Parameters are being written: neither the old nor the new state is there."""


@dataclass(frozen=True)
class Rebuilding[S: IterationStateLike]:
    """The state is being loaded, replayed or copied."""

    reached: S | None = None
    """How far a replay is on the way; nothing to rely on before it is through."""


type Position[S: IterationStateLike] = Whole[S] | Running[S] | Torn | Rebuilding[S]


class RankState[S: IterationStateLike]:
    """The training state of one rank. Training thread only.

    Args:
        committed: newest iteration known to be committed, `NOWHERE` if none is.
        state: what the rank starts from; None: it is still to be rebuilt.

    Attributes:
        position: what the rank has of the training state.
        committed: newest iteration it knows to be committed, on whichever rank.
        pending: what a failure has left to do before the next iteration.
    """

    def __init__(self, committed: int, state: S | None = None) -> None:
        self.position: Position[S] = Rebuilding() if state is None else Whole(state)
        self.committed = committed
        self.pending: Localized | None = None
        if state is not None and state.iteration != committed:
            raise self._forbidden(f'starts at {state.iteration}')

    # Read off

    @property
    def clean_at(self) -> int:
        """Iteration whose whole state the rank has or can roll back to; `NOWHERE`: none."""
        kept = self.kept
        return NOWHERE if kept is None else kept.iteration

    @property
    def kept(self) -> S | None:
        """The auxiliary state of that iteration."""
        return self.position.state if isinstance(self.position, Whole | Running) else None

    @property
    def rebuilding(self) -> bool:
        """The state is not there yet; what is computed meanwhile commits nothing."""
        return isinstance(self.position, Rebuilding)

    # An iteration

    def begins(self, state: S) -> None:
        """The iteration after `state` begins."""
        match self.position:
            case Rebuilding():
                pass  # a stage that catches up
            case Whole(before) if before.iteration == state.iteration and self.pending is None:
                self.position = Running(state)
            case _:
                raise self._forbidden(f'begins after {state.iteration}')

    def updating(self) -> None:
        """The optimizer begins to write, perhaps not for the first time in this iteration."""
        if self.rebuilding:
            self.position = Rebuilding()
        elif self.pending is None:
            self.position = Torn()
        else:
            raise self._forbidden('updates')

    def stepped(self, state: S) -> None:
        """The optimizer has written, or skipped the update; `state` is what comes out of it."""
        match self.position:
            case Rebuilding():
                self.reached(state)
            case Torn() | Running() if self._follows(state):
                self.position = Whole(state)
                self.committed = state.iteration
            case _:
                raise self._forbidden(f'stepped to {state.iteration}')

    def _follows(self, state: S) -> bool:
        """The same iteration again: a loop may step twice in one, which its caller refuses."""
        return self.pending is None and state.iteration - self.committed in (0, 1)

    # A failure

    def decided(self, verdict: Localized, rank: int) -> None:
        """All have met and agree on what is to be done; `rank` is this one."""
        if rank in verdict.ranks or rank in verdict.copies:
            self.position = Rebuilding()
        elif self.clean_at != verdict.target:
            raise self._forbidden(f'is to keep its state of iteration {verdict.target}')
        self.committed = verdict.target
        self.pending = verdict

    def goes_on(self, verdict: Localized) -> None:
        """All have met again beside a replay of this rank, which goes on where it is."""
        match self.position:
            case Rebuilding() | Whole() if self.pending and verdict.target == self.pending.target:
                self.pending = verdict
            case _:
                raise self._forbidden(f'goes on to iteration {verdict.target}')

    def undone(self) -> None:
        """What the iteration that was cut off had begun is put back."""
        match self.position:
            case Whole(state) | Running(state):
                self.position = Whole(state)
            case _:
                raise self._forbidden('rolls back to a state that it does not have')

    def reached(self, state: S) -> None:
        """A replay or a copy has come to `state`."""
        match self.position:
            case Rebuilding(before) if before is None or before.iteration <= state.iteration:
                self.position = Rebuilding(state)
            case _:
                raise self._forbidden(f'reaches {state.iteration}')

    def rebuilt(self) -> None:
        """The state that was reached is whole: that of the newest committed iteration."""
        match self.position:
            case Rebuilding(state) if state is not None and state.iteration == self.committed:
                self.position = Whole(state)
            case _:
                raise self._forbidden('takes for rebuilt what is not')

    def resumed(self) -> None:
        """All ranks are at the target and connected; training continues."""
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
