# SPDX-License-Identifier: Apache-2.0
"""A protected job in which only the stages that lost a worker go back."""

from collections.abc import Callable
from typing import Any

from moevement_ext.job.whole_job_mode import Restart, WholeJobMode
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.report import NOWHERE
from moevement_ext.protect.protection import Protection
from moevement_ext.recover.localized import LocalizedRecovery
from moevement_ext.recover.rank_state import RankState
from moevement_ext.recover.trainer import Start, Trainer
from moevement_ext.recover.verification import Verification

LOOP_ENDS = object()
"""What a step returns when the loop is to end where it is."""


class LocalizedMode(WholeJobMode):
    """Trains with protection, through failures of other ranks. Training thread only.

    Args:
        rank: this rank.
        trainer: its training loop.
        protection: started.
        restart: what this life of the job began with, None if there was nothing.
        membership: this process among the others.
    """

    def __init__(
        self,
        rank: Rank,
        trainer: Trainer,
        protection: Protection,
        restart: Restart | None,
        membership: Membership,
    ) -> None:
        lost = None if rank.config.store is None else membership.store_lost
        super().__init__(rank, trainer, protection, restart, lost)
        self._membership = membership
        self._trained = False
        self._recovery: LocalizedRecovery | None = None

    def train(self, run: Callable[[], Any]) -> Any:
        """The training loop, entered again after failures of others."""
        self.trainer.pipeline.log_to(self.protection.memory.log)
        self._recovery = LocalizedRecovery(
            self.rank,
            self._membership,
            self.trainer,
            self.protection,
            self.protection.planner,
            self._position(),
        )
        try:
            result = self._recovery.train(run)
        except SystemExit:  # an end that all ranks have come to together
            self._trained = True
            raise
        self._trained = True
        self.protection.drain()
        return result

    def step(self, iteration: int) -> Any:
        """The iteration after `iteration`, after what a failure has left to do."""
        if self.recovery.pending():
            self.drop_conversion()
            if not self.recovery.carry_out(self.iterate):
                return LOOP_ENDS
            return self.iterate(iteration)
        return super().step(iteration)

    @property
    def recovering(self) -> bool:
        """The next step has a recovery to carry out first."""
        return super().recovering or self.recovery.pending()

    def updating(self) -> None:
        """The optimizer begins to write."""
        if self.running:
            self.recovery.updating()

    def stepped(self, skipped: bool) -> None:
        """The optimizer is done; nothing is noted of an update that may be wrong."""
        if self.running:
            self.recovery.committing()
        super().stepped(skipped)

    def begins(self, start: Start) -> None:
        """The iteration after `start` begins."""
        self.recovery.begin(start)

    def committed(self, start: Start) -> None:
        """The update that leads to `start` is written."""
        self.recovery.stepped(start)

    def verifications(self) -> list[Verification]:
        """For the start of all, and for the newest replay of this stage."""
        return [*super().verifications(), self.recovery.verification]

    def converted(self, start: Start) -> None:
        """All stages are at `start`."""
        self.recovery.converted(start)

    def failed(self, error: Exception) -> None:
        """The program has failed; if another rank died, and training is over, all start again."""
        if self._trained and self.recovery.announced():  # whatever the error says
            self.recovery.give_up('a worker died after training had ended')

    @property
    def recovery(self) -> LocalizedRecovery:
        """Made when training begins."""
        assert self._recovery is not None
        return self._recovery

    def _position(self) -> RankState[Start]:
        """What this rank has when its training loop is entered for the first time."""
        if self._membership.joining:
            return RankState(NOWHERE)
        if self._restart is not None:
            return RankState(self._restart.conversion.last.iteration)
        iteration = self.trainer.iteration
        return RankState(iteration, Start(iteration, self.trainer.small_state.now()))
