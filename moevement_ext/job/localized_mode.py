# SPDX-License-Identifier: Apache-2.0
"""A protected job in which only the stages that lost a worker roll back."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
"""Result of a step after which the loop ends at once."""


@contextmanager
def settled() -> Iterator[None]:
    """Collect garbage once; collections within the context skip all objects that exist now.

    A survivor collects garbage in each recovery. Megatron and torch consist of some 400,000
    objects; visiting them takes tenths of a second of CPU time, on all ranks of a host at once.
    Skipped objects are still freed when their last reference is dropped, but not if they are
    part of a reference cycle.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class LocalizedMode(WholeJobMode):
    """Trains with protection and survives failures of other ranks. Training thread only.

    `protection` is started; `restart` has the windows that this start of the job resumes from,
    if any.
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
        self.trainer.pipeline.log_to(self.protection.memory.log)
        self._recovery = LocalizedRecovery(
            self.rank,
            self._membership,
            self.trainer,
            self.protection,
            self._position(),
        )
        # Not when joining: survivors wait for this process, which was forked from one that has
        # done this, or starts cold.
        context = nullcontext() if self._membership.joining else settled()
        try:
            with context:
                result = self._recovery.train(run)
        except SystemExit:  # all ranks end here together
            self._trained = True
            raise
        self._trained = True
        self.protection.checkpointer.drain()
        return result

    def step(self, iteration: int) -> Any:
        if self.recovery.pending():
            self.drop_conversion()
            if not self.recovery.carry_out(self.iterate):
                return LOOP_ENDS
            self.keep_judged()
            return self.iterate(iteration)
        return super().step(iteration)

    @property
    def recovering(self) -> bool:
        return super().recovering or self.recovery.pending()

    def updating(self) -> None:
        if self.running:
            with self.protection.checkpointer.statistics.device_wait():
                self.recovery.updating()

    def stepped(self, skipped: bool) -> None:
        """Record the update, unless it may be wrong."""
        if self.running:
            with self.protection.checkpointer.statistics.device_wait():
                self.recovery.committing()
        super().stepped(skipped)

    def begins(self, start: Start) -> None:
        self.recovery.begin(start)

    def committed(self, start: Start) -> None:
        self.recovery.stepped(start)

    def verifications(self) -> list[Verification]:
        """Verifications of the start of the job, and of this stage's newest replay."""
        return [*super().verifications(), self.recovery.verification]

    def converted(self, start: Start) -> None:
        self.recovery.converted(start)

    def end_if_other_bits(self, found: str) -> None:
        """Not collective: a rank may have been replaced since. The others hear of it in a round."""
        if found:
            self.recovery.end_job(found)

    def failed(self) -> None:
        """Restart the whole job if another worker died after training had ended."""
        if self._trained and self.recovery.announced():
            self.recovery.give_up('a worker died after training had ended')

    @property
    def recovery(self) -> LocalizedRecovery:
        """The recovery, which is created when training begins."""
        assert self._recovery is not None
        return self._recovery

    def _position(self) -> RankState:
        """State of this rank when it enters the training loop for the first time."""
        if self._membership.joining:
            return RankState(NOWHERE)
        if self._restart is not None:
            return RankState(self._restart.conversion.last.iteration)
        iteration = self.trainer.iteration
        return RankState(iteration, Start(iteration, self.trainer.auxiliary_state.now()))
