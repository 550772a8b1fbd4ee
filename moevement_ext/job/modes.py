# SPDX-License-Identifier: Apache-2.0
"""Modes of a job: a failure restarts all workers, or only lost stages roll back.

With protection every iteration captures a slot. If this start of the job found windows of an
earlier one, the first iteration converts them, all stages together.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import psutil

from moevement_ext.config import OFF
from moevement_ext.events import Recovered
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.report import NOWHERE
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.protect.protection import Protection
from moevement_ext.recover import outage, whole_job
from moevement_ext.recover.conversion import Conversion
from moevement_ext.recover.localized import LocalizedRecovery
from moevement_ext.recover.outage import Summary, conversion_line, recovered_line
from moevement_ext.recover.rank_state import RankState
from moevement_ext.recover.trainer import Start, Trainer
from moevement_ext.recover.verification import Verification, Verified
from moevement_ext.recover.whole_job import restart_whole_job

# Time for slower ranks to receive the last messages of this rank and reach the same point; a rank
# that does not reach this point has the window as well.
_OTHERS_S = 2.0

# Longest list of ranks in one message.
_MOST_LISTED = 4


@dataclass
class Restart:
    """The recovery of a job that resumes from windows of an earlier start."""

    predecessor: whole_job.Predecessor
    conversion: Conversion
    captured: list[SlotHeader]
    """Headers of newer slots, to verify that the recovery is exact."""
    recorded: list[LedgerEntry]
    """Ledger entries of the recomputed iterations, to verify the recovery."""
    seconds: dict[str, float]
    """Duration of each phase on this rank."""
    tokens_lost: float | None = None
    """Tokens lost on all ranks; see `Verified`."""

    @property
    def catches_up_to(self) -> int:
        """The newest iteration committed earlier, or the last iteration of the window."""
        return max(self.predecessor.committed, self.conversion.last.iteration)


def tokens_lost(rank: Rank, protection: Protection, conversion: Conversion) -> float | None:
    """Tokens whose expert updates are lost, over all ranks; None if none can be.

    Collective with a lossy strategy.
    """
    lost = protection.lose_tokens(conversion.file())
    if lost is None:
        return None
    return sum(float(item) for item in rank.exchange('tokens-lost', repr(lost).encode()))


class UnprotectedMode:
    """Runs only the iterations, without host memory. Training thread only."""

    recovering = False

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def train(self, run: Callable[[], Any]) -> Any:
        return run()

    def step(self, iteration: int) -> Any:
        return self._trainer.iterate(iteration)

    def failed(self) -> None:
        """Do nothing: this mode cannot recover."""


@dataclass(eq=False)
class WholeJobMode:
    """Trains with protection. Training thread only.

    `protection` is started; `restart` has the windows that this start of the job resumes from,
    if any. `store_lost` is set while the ranks' store counts as lost; None without a store.
    """

    rank: Rank
    trainer: Trainer
    protection: Protection
    _restart: Restart | None
    _store_lost: threading.Event | None = None

    def __post_init__(self) -> None:
        self._converting = self._restart is not None
        self._catch_up_to = NOWHERE if self._restart is None else self._restart.catches_up_to
        self._caught_up_from = 0.0
        self._running: int | None = None
        # With `--sparse-ckpt-verify stop`: entries that this rank lacked, recomputed by this start.
        self._unjudged: list[LedgerEntry] = []
        self._verification = Verification.of_nothing()
        if self._restart is not None:
            if self.rank.config.verify != OFF:
                self._verification = Verification(
                    self._restart.captured, self.trainer.operators.slices, self._restart.recorded
                )
            self._verification.tokens_lost = self._restart.tokens_lost

    def train(self, run: Callable[[], Any]) -> Any:
        self.trainer.pipeline.log_to(None)
        result = run()
        self.protection.checkpointer.drain()
        return result

    def step(self, iteration: int) -> Any:
        if self._converting:
            self._convert()
        return self.iterate(iteration)

    @property
    def recovering(self) -> bool:
        return self._converting

    def failed(self) -> None:
        """Handle an error of the program; the launcher restarts all workers."""
        if self._store_lost is not None and self._store_lost.is_set():  # other ranks may have left
            self.protection.checkpointer.drain()

    # Around the update

    def before_update(self) -> None:
        self.protection.checkpointer.before_update()

    def updating(self) -> None:
        """Record that the optimizer begins to write."""

    def stepped(self, skipped: bool) -> None:
        """Record the update; during a conversion an update commits nothing."""
        if self._running is None:
            self._record_replayed(skipped)
            return
        iteration = self._running + 1
        state, entry, begins_window = self.trainer.record(iteration, skipped)
        if begins_window:
            self.protection.checkpointer.begin_window(iteration)
        for verification in self.verifications():
            verification.check(iteration, entry)
        if iteration > self._catch_up_to:  # which takes all ranks: each has judged itself
            self.keep_judged()
        self._keep(entry)
        self.rank.events.iteration = iteration
        self.committed(Start(iteration, state))
        log = self.protection.memory.log
        if log is not None and iteration <= self._catch_up_to and self.protection.stops:
            if not self.recovering:  # nothing is captured: another failure restarts all workers
                log.drop_until(iteration)
        if iteration == self._catch_up_to:
            self._recovered()

    def _record_replayed(self, skipped: bool) -> None:
        """Rewrite a replayed iteration into the ledger, which may be lost with its node."""
        if self._restart is None or not self._converting:
            return
        iteration, ledger = self._restart.conversion.replaying, self.protection.memory.ledger
        if iteration is not None and ledger.get(iteration) is None:
            self._keep(self.trainer.record(iteration, skipped).entry)

    def _keep(self, entry: LedgerEntry) -> None:
        """Append to the ledger; what a recovery is judged by stays as it was recorded first."""
        ledger = self.protection.memory.ledger
        recorded = ledger.get(entry.iteration) if self.protection.stops else None
        if recorded is None and self.protection.stops and entry.iteration <= self._catch_up_to:
            self._unjudged.append(entry)  # another rank may judge it wrong
        else:
            ledger.append(recorded or entry)

    def keep_judged(self) -> None:
        """Add what this start has recomputed to the ledger, once no rank objects."""
        for entry in self._unjudged:
            self.protection.memory.ledger.append(entry)
        self._unjudged.clear()

    # For subclasses

    def begins(self, start: Start) -> None: ...

    def committed(self, start: Start) -> None: ...

    def converted(self, start: Start) -> None: ...

    def verifications(self) -> list[Verification]:
        """Verifications of this process's finished and current recoveries."""
        return [self._verification]

    @property
    def running(self) -> bool:
        """True while an iteration runs whose update will be committed."""
        return self._running is not None

    def drop_conversion(self) -> None:
        """Drop the pending conversion of all stages, after a failure led to a new verdict."""
        if self._converting:
            self._converting = False
            self._catch_up_to = NOWHERE
            self._unjudged.clear()

    def iterate(self, iteration: int) -> Any:
        with self.protection.exposed():
            state = self.trainer.begin_iteration(iteration)
            self.begins(Start(iteration, state))
            self.protection.begin(iteration, state)
        if self._store_lost is not None and self._store_lost.is_set():
            self._leave_between_windows()
        self._running = iteration
        try:
            result = self.trainer.iterate(iteration)
        finally:
            self._running = None
        with self.protection.exposed():
            self.protection.end(iteration + 1, replayed=iteration < self._catch_up_to)
        return result

    # The store is lost

    def _leave_between_windows(self) -> None:
        """Restart the whole job once no window is in capture.

        Without the store no rank can announce a failure. The restarted job finds the windows that
        are complete in host memory.
        """
        if self.protection.checkpointer.window_under_way:
            return
        self.protection.checkpointer.drain()
        time.sleep(_OTHERS_S)
        restart_whole_job(self.rank, 'the store in which the ranks meet is lost')

    # Recovery

    def _convert(self) -> None:
        assert self._restart is not None
        conversion = self._restart.conversion
        conversion.run(self.trainer, self._verification)
        first, last = conversion.first, conversion.last
        self.converted(last)
        self._converting = False
        conversion.let_go()
        self.rank.events.iteration = last.iteration
        self._verification.check(last.iteration)
        self._restart.seconds |= {'load': conversion.load_s, 'convert': conversion.replay_s}
        self._caught_up_from = time.perf_counter()
        if self.rank.number == self.rank.world_size - 1:
            line = conversion_line(first.iteration, last.iteration, conversion.tier)
            print(line, flush=True)
        if self._catch_up_to <= last.iteration:
            self._recovered()

    def _recovered(self) -> None:
        assert self._restart is not None
        verified = self._verification.result()
        self._judge()
        seconds = self._restart.seconds
        seconds['catch_up'] = time.perf_counter() - self._caught_up_from
        replayed = self._catch_up_to - self._restart.conversion.first.iteration
        self.rank.events.emit(
            Recovered(
                replayed=replayed,
                verified=verified.verified,
                verified_at=verified.verified_at,
                differing=list(verified.differing),
                iterations=verified.iterations,
                seconds={name: round(value, 3) for name, value in seconds.items()},
            )
        )
        speaks = self.rank.number == self.rank.world_size - 1
        if speaks or verified.differing:
            print(recovered_line(self._catch_up_to, replayed, verified), flush=True)
        if speaks:
            self._sum_up(replayed, verified, seconds)

    def _judge(self) -> None:
        """With `--sparse-ckpt-verify stop`, end the job if the state is not what it had been."""
        if not self.protection.stops:
            return
        assert self._restart is not None
        window, found = self._restart.conversion.window, ''
        if self._verification.forbids(self.rank.config.verify):
            found = f'window {window.start}: {self._verification.result()}'
        self.end_if_other_bits(found)
        self.protection.windows.go_back_to(window)

    def end_if_other_bits(self, found: str) -> None:
        """End the job if any rank has found differences. Collective."""
        answers = self.rank.exchange('judged', found.encode())
        differing = [f'rank {rank}: {item.decode()}' for rank, item in enumerate(answers) if item]
        if differing:
            whole_job.end_with_other_bits(self.rank, '; '.join(differing[:_MOST_LISTED]))

    def _sum_up(self, replayed: int, verified: Verified, seconds: Mapping[str, float]) -> None:
        """Report the result of the recovery; one rank reports its own observations."""
        assert self._restart is not None
        restart, committed = self._restart, self._restart.predecessor.committed
        began = psutil.Process().create_time()
        here = {
            'loading': seconds['find'] + seconds['obtain'] + seconds['load'],
            'replaying': seconds['convert'] + seconds['catch_up'],
        }

        def summary(cause: str, since: float | None) -> Summary:
            # The clock may have been set back.
            away_s = max(time.time() - (began if since is None else since), 0.0)
            return Summary(
                iteration=self._catch_up_to,
                cause=f'the whole job: {cause}',
                lost=None if committed < 0 else 0,  # committed iterations are recomputed
                replayed=replayed,
                away_s=None if since is None else away_s,
                seconds={'starting processes': max(away_s - sum(here.values()), 0.0), **here},
                source=f'window {restart.conversion.window.start} from {restart.conversion.tier}',
                verified=verified,
            )

        outage.of_the_whole_job(restart.predecessor.first_death, summary)


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
            self.rank, self._membership, self.trainer, self.protection, self._position()
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
