# SPDX-License-Identifier: Apache-2.0
"""Localized recovery, seen from one rank: survivors keep their state, lost stages replay.

After a failure all ranks rendezvous (see `membership`), reach the same verdict, and enter the
training loop at the newest committed iteration; new processes enter it for the first time. In the
first iteration the lost stages replay (see `stage_replay`), all ranks reconnect, and training
continues (paper section 3.4).
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from moevement_ext import faults
from moevement_ext.config import GLOBAL, LOCALIZED
from moevement_ext.errors import EXIT_OTHER_BITS, EXIT_WHOLE_JOB
from moevement_ext.events import FailureDetected, Recovered, RecoveryPhase, RecoveryStarted
from moevement_ext.faults import Phase
from moevement_ext.logger import logger_of
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.rendezvous import RoundEnded
from moevement_ext.membership.rendezvous_runner import Beside, Met
from moevement_ext.membership.report import NOWHERE, Report
from moevement_ext.membership.store_loss import StoreLost
from moevement_ext.memory.window.name import TRIES, Window
from moevement_ext.protect.protection import Protection
from moevement_ext.rates import timed
from moevement_ext.recover.fruitless import Fruitless, in_words, lost_peer
from moevement_ext.recover.outage import Outage, Phases, recovered_line
from moevement_ext.recover.own_report import OwnReport, handovers
from moevement_ext.recover.rank_state import RankState, Running, Whole
from moevement_ext.recover.stage_replay import OtherBits, SourceLost, StageReplay, WindowRefused
from moevement_ext.recover.trainer import Start, Trainer
from moevement_ext.recover.verdict import Localized, Verdict, WholeJob, decide_recovery
from moevement_ext.recover.verification import Verification, Verified
from moevement_ext.recover.whole_job import end_with_other_bits, restart_whole_job

logger = logger_of(__name__)

_ANNOUNCEMENT_S = 2.0
_POLL_S = 0.02
# Of a new process: its replica server, and the coordinator that it keeps.
_ADDRESSES = msgspec.msgpack.Decoder(tuple[tuple[str, int], tuple[str, int] | None])


@dataclass(eq=False)
class LocalizedRecovery:
    """Recovers this rank from failures of other ranks, or rebuilds a lost rank's state.

    `position` is this rank's part of the training state.
    """

    _rank: Rank
    _membership: Membership
    _trainer: Trainer
    _protection: Protection
    _position: RankState

    def __post_init__(self) -> None:
        job = self._rank, self._membership, self._trainer, self._protection
        then = self._enters, self._trust_collectives
        self._replay = StageReplay(self._rank, self._trainer, self._protection, *then)
        self._refused: list[Window] = []
        self._other_bits = ''
        self._lost_sources = 0
        self._fruitless = Fruitless()
        self._report = OwnReport(*job, self._position, self._fruitless)
        self._phases = Phases()
        self._first_iteration = False
        self._went_on = 0
        self._outage = Outage(self._rank.number)

    # Called by the training thread in every iteration

    def begin(self, start: Start) -> None:
        self._raise_if_broken()
        self._position.begins(start)

    def updating(self) -> None:
        """Record that the optimizer, or the next of several, is about to write.

        Raises `RoundEnded` if a failure was announced before the first one writes: the last
        reduction may be invalid. All gradients are reduced by then, so the others do not check,
        except in a replay.
        """
        if not self._position.torn:
            self._trust_collectives()
        self._position.updating()
        if not self._position.rebuilding:
            self._membership.not_updating.clear()

    def _trust_collectives(self) -> None:
        """Wait for the GPU; raise `RoundEnded` if the results so far may be invalid.

        NCCL's waits return when they are aborted, and leave any bytes. So before a state counts
        as whole, no failure may have been announced.
        """
        self._membership.synchronize()
        self._raise_if_broken()

    def committing(self) -> None:
        """Record that the optimizer has written and the parameters are gathered.

        Raises `RoundEnded` if the gathered parameters may be invalid (see `updating`). If
        waits raise, they are valid: an update that completes after a failure counts.
        """
        self._membership.synchronize()
        if self._membership.waits_returned:
            raise RoundEnded('another rank was lost during the update')

    def stepped(self, start: Start) -> None:
        """Record the committed update; the next iteration starts from `start`."""
        self._position.stepped(start)
        if self._position.rebuilding:  # a replaying stage is behind until its replay ends
            return
        self._membership.not_updating.set()
        self._membership.committed = start.iteration
        self._fruitless.progressed()
        self._trainer.loop.committed(start.iteration)
        if self._first_iteration:
            self._first_iteration = False
            self._enters('over')
            self._outage.say()

    def converted(self, start: Start) -> None:
        """Record that all stages have converted their windows together, to `start`.

        Raises `RoundEnded` if the last replayed iteration may be invalid.
        """
        self._trust_collectives()
        self._position.reached(start)
        self._position.rebuilt()

    @property
    def verification(self) -> Verification:
        return self._replay.verification

    # Around the loop

    def train(self, run: Callable[[], Any]) -> Any:
        """Run the loop, again after failures of other ranks; raises this rank's own errors."""
        self._membership.settle()
        again = self._membership.joining
        if not again:
            self._watch()
        while True:
            verdict = self._decide() if again else None
            try:
                if verdict is not None:
                    self._enter(verdict)
                result = run()
                if self.pending():  # all iterations were committed before the failure
                    self.carry_out(_no_iteration)
                self._outage.say()
                return result
            except Exception as error:
                if not self.caused_by_others(error):
                    raise
                self._leave(in_words(error))
                ended = self._membership.ended_round
                self._fruitless.failed(error, ended, self._between_steps)
            self._meet()
            again = True

    @property
    def _between_steps(self) -> bool:
        return isinstance(self._position.position, Whole) and not self.pending()

    def pending(self) -> bool:
        """Return True if `carry_out` must run before the next iteration, after a failure."""
        return self._position.pending is not None

    def carry_out(self, iterate: Callable[[int], Any]) -> bool:
        """Replay lost state and reconnect, in the first iteration after entering the loop.

        `iterate` runs the iteration after the given one and commits it. Returns False if
        the loop must end. Raises `RoundEnded` if another failure came first.
        """
        verdict = self._position.pending
        assert verdict is not None
        self._watch()
        with timed(self._phases, 'respawn'):
            self._enters('respawn')
            if verdict.window is not None and self._rank.number in verdict.ranks:
                # Before any rank reads this log: other replaying stages wait for the tensors that
                # are sent again.
                self._protection.rewind_log(verdict.window.start)
                self._protection.withdraw_after(verdict.window.name)
            else:
                self._sends_no_more()
            if self._rank.number not in verdict.replacements:
                self._protection.lose_holders(verdict.replacements)
            self._exchange_addresses(verdict)
        if verdict.window is not None and self._rank.number in verdict.ranks:
            self._protection.room_for_recovery(verdict.window.start, verdict.target)
        with self._outage.replay():
            if self._rank.number in verdict.ranks:
                verdict = self._replay_stage(verdict, iterate)
            else:
                self._connect_early(verdict)
                self._meet_replayed()
        faults.point(Phase.REGROUP)
        self._enters('regroup')
        self._connect_all(verdict)
        if self._rank.number not in verdict.ranks | verdict.copies.keys():
            self._roll_back()
        self._copy(verdict)
        return self._resume(verdict)

    # Failure

    def caused_by_others(self, error: BaseException) -> bool:
        """Return True if the loss of another rank is the known cause of `error`.

        Between two steps a `ConnectionError` is that of the program: of a server of its own, or of
        a reader of its output. After the last step all others only wait for this rank.
        """
        over = self._membership.committed >= self._trainer.last_iteration
        of_program = self._between_steps and (over or isinstance(error, ConnectionError))
        of_round = isinstance(error, RoundEnded) or (lost_peer(error) and not of_program)
        return of_round or self.announced()

    def announced(self) -> bool:
        """Return True if another rank was lost, even if the announcement is still to follow."""
        deadline = time.monotonic() + _ANNOUNCEMENT_S
        while not self._membership.broken:
            if time.monotonic() > deadline:
                return self._membership.broken_in_the_store()
            time.sleep(_POLL_S)
        return True

    def _raise_if_broken(self) -> None:
        if self._membership.broken:
            raise RoundEnded('another rank is gone')

    def _watch(self) -> None:
        self._membership.watch(self._rank.backend, self._replay.interrupt)

    def _enters(self, phase: str) -> None:
        self._rank.events.emit(RecoveryPhase(phase=phase))

    def _leave(self, reason: str) -> None:
        began = time.perf_counter()
        self._enters('detect')
        self._membership.not_updating.set()
        faults.point(Phase.DETECT)
        try:
            self._membership.leave(reason)
        except StoreLost as lost:
            self._protection.checkpointer.drain()
            self.give_up(str(lost))
        unblock = time.perf_counter() - began
        self._phases = Phases(detect=self._membership.detect_s, unblock=unblock)
        self._rank.events.emit(FailureDetected(reason=self._membership.reason))
        self._outage.begins(
            self._membership.reason, self._membership.detect_s, self._membership.reports
        )
        logger.warning('recovering: %s', self._membership.reason)

    def _meet(self) -> None:
        with timed(self._phases, 'respawn'):
            self._enters('meet')
            if not self._membership.joining:  # while the new process is starting
                self._trainer.loop.leave()
            self._membership.silence()
            self._protection.persistence.leave(self._membership.reason)
            try:
                self._membership.meet(lambda: self._report.now(self._refused, self._other_bits))
            except StoreLost as lost:
                self.give_up(f'{lost}, in a rendezvous')
            self._outage.met(self._membership.reports)

    def _decide(self) -> Localized:
        reports = self._membership.reports
        # Kept on all ranks: the refusing rank may be lost, and its replacement lacks the list.
        self._refused = sorted({window for report in reports for window in report.refused})
        if not all(report.survivor for report in reports):
            self._lost_sources = 0  # the source that did not answer was the process that died
        verdict = self._fruitless.met(reports, self._follows_from(reports))
        if isinstance(verdict, WholeJob):
            self.give_up(verdict.reason, verdict.code)
        self._protection.checkpointer.history = verdict.history_after(reports)
        return verdict

    def _follows_from(self, reports: Sequence[Report]) -> Verdict:
        planner = self._protection.planner
        return decide_recovery(
            reports,
            planner.stage_of,
            planner.tied,
            self._trainer.last_iteration,
            planner.replicas,
            interleaved=self._trainer.place.interleaved,
            together=self._rank.config.recovery == GLOBAL,
        )

    def _enter(self, verdict: Localized) -> None:
        self._fruitless.pause(lambda: self._membership.broken)
        reports = self._membership.reports
        self._position.decided(verdict, self._rank.number)
        self._replay.take_over_ledger(
            verdict, reports, self._protection.planner.stage_of, lambda: self._membership.broken
        )
        entry = self._protection.memory.ledger.get(verdict.target)
        samples = None if entry is None else entry.consumed_samples
        self._trainer.auxiliary_state.count(verdict.target, samples)
        self._trainer.loop.enter(self._others())
        self._membership.joining = False

    def _others(self) -> list[bytes]:
        return [handover.trainer for handover in handovers(self._membership.reports)]

    def give_up(self, reason: str, code: int = EXIT_WHOLE_JOB) -> NoReturn:
        """All workers end, and the launcher restarts the whole job, or ends it (`WholeJob`)."""
        if code == EXIT_OTHER_BITS:
            end_with_other_bits(self._rank, reason)
        restart_whole_job(self._rank, reason)

    def end_job(self, other_bits: str) -> NoReturn:
        """Have all ranks end for what this rank's recovery computed otherwise than before."""
        self._other_bits = other_bits
        raise RoundEnded(other_bits)

    # Recovery

    def _replay_stage(self, verdict: Localized, iterate: Callable[[int], Any]) -> Localized:
        """Replay with the whole stage, then wait for the other ranks; return the newest verdict.

        Failures that do not concern the stage are handled on another thread meanwhile.
        """
        assert verdict.window is not None
        window = verdict.window
        self._rank.events.emit(RecoveryStarted(start=window.start, dense_at=window.dense_at))
        self._enters('regroup')
        self._connect_early(verdict)
        self._went_on = 0
        if verdict.together:  # no stage can proceed without the others
            self._replay_window(verdict, iterate)
            self._await_replays()
            return verdict
        report = self._report.of_replay(window, verdict.target, self._refused)
        beside = Beside(report, self._goes_on)
        with self._membership.delegated_to(beside):
            self._replay_window(verdict, iterate)
            self._sends_no_more()
            return self._wait_for_others(verdict, beside)

    def _replay_window(self, verdict: Localized, iterate: Callable[[int], Any]) -> None:
        window = verdict.window
        assert window is not None
        try:
            self._replay.run(
                verdict, self._membership.reports, iterate, self._position, self._phases
            )
        except WindowRefused as refusal:
            self._refused.append(window)
            self._fruitless.progressed()  # another window is tried next
            raise RoundEnded(str(refusal)) from refusal
        except OtherBits as found:
            self.end_job(str(found))
        except SourceLost as lost:
            self._lost_sources += 1
            if self._lost_sources >= TRIES:
                self._refused.append(window)
                self._fruitless.progressed()
            raise RoundEnded(str(lost)) from lost

    def _goes_on(self, reports: Sequence[Report]) -> bool:
        """Decide whether this rank's replay continues. Not on the replaying thread."""
        verdict = self._follows_from(reports)
        if isinstance(verdict, WholeJob) or self._rank.number not in verdict.going_on:
            return False
        self._protection.lose_holders(verdict.replacements)
        self._protection.persistence.enter(self._membership.newest_round, reports)
        return True

    def _wait_for_others(self, verdict: Localized, beside: Beside) -> Localized:
        met = self._membership.take_over(beside, wait=False)  # the round's keys may be deleted
        while True:
            with suppress(RoundEnded):
                if met:
                    verdict = self._take_over(met)
                self._await_replays()
                if self._membership.try_detach(beside):
                    return verdict
            met = self._membership.take_over(beside, wait=True)

    def _await_replays(self) -> None:
        self._outage.publish_verified(self._membership.store, self.verification.result())
        self._meet_replayed()

    def _meet_replayed(self) -> None:
        """Wait at a barrier that a rank with a refused replay never reaches."""
        faults.point(Phase.REPLAYED)
        self._membership.barrier('replayed')

    def _take_over(self, met: Sequence[Met]) -> Localized:
        """Move to the round that the other ranks have reached meanwhile."""
        for one in met:
            self._outage.begins(one.reason, one.detect_s, one.before)
            self._outage.met(one.reports)
            self._rank.events.emit(FailureDetected(reason=one.reason))
            logger.warning('the replay continues after: %s', one.reason)
        self._went_on += len(met)
        verdict = self._decide()
        self._position.goes_on(verdict)
        self._exchange_addresses(verdict)
        return verdict

    def _sends_no_more(self) -> None:
        """Note that this rank logs no more sends in this recovery, so that replays do not wait."""
        if (log := self._protection.memory.log) is not None:
            log.pause()

    def _exchange_addresses(self, verdict: Localized) -> None:
        """Wait until new processes are set up, and obtain their addresses."""
        rank, store = self._rank.number, self._membership.store
        addresses = self._protection.memory.addresses
        if rank in verdict.replacements:
            own = addresses[rank], self._protection.persistence.coordinator
            store.set(f'address/{rank}', msgspec.msgpack.encode(own))  # type: ignore[arg-type]
        self._membership.barrier('ready')
        coordinator = None
        for other, report in enumerate(self._membership.reports):
            if report.address is not None:
                addresses[other] = report.address
        for other in verdict.replacements:
            addresses[other], found = _ADDRESSES.decode(store.get(f'address/{other}'))
            coordinator = found or coordinator
        number, reports = self._membership.taken.round, self._membership.reports
        self._protection.persistence.enter(number, reports, coordinator)
        newest = verdict.target
        if verdict.window is not None and rank in verdict.beginning:
            newest = verdict.window.start
        self._protection.reach_peers(newest)

    def _connect_early(self, verdict: Localized) -> None:
        """Connect this rank with the ranks that replay with it, or that wait with it.

        All ranks must agree about each group; they do, as it follows from the reports of all.
        """
        with timed(self._phases, 'regroup'):
            self._membership.renew(self._connected_with(verdict))

    def _connect_all(self, verdict: Localized) -> None:
        """Connect all ranks, once no rank replays."""
        with timed(self._phases, 'regroup'):
            kept = self._connected_with(verdict)
            if len(kept) < len(self._membership.reports):
                self._membership.renew(None, kept)

    def _connected_with(self, verdict: Localized) -> frozenset[int]:
        return verdict.connected_with(self._rank.number, self._membership.reports)

    def _roll_back(self) -> None:
        kept = self._position.kept
        assert kept is not None
        began = isinstance(self._position.position, Running)
        self._trainer.undo_broken_iteration(kept.state, began)
        self._protection.rewind_log(kept.iteration)
        self._position.undone()

    def _copy(self, verdict: Localized) -> None:
        rank, store = self._rank.number, self._membership.store
        for behind, replica in verdict.copies.items():
            if rank == replica:
                assert self._position.kept is not None  # its state is complete
                state = self._position.kept.state
                store.set(f'state/{behind}', state)  # type: ignore[arg-type]
        family = {rank, *self._protection.planner.replicas[rank]}
        source = next((have for lack, have in verdict.copies.items() if lack in family), None)
        if source is None:
            return
        with timed(self._phases, 'fetch'):
            if rank in verdict.copies:
                self._protection.checkpointer.stop_capturing()
            self._trainer.operators.copy(source)
            self._trust_collectives()
            if rank in verdict.copies:
                self._position.reached(Start(verdict.target, store.get(f'state/{rank}')))
                self._position.rebuilt()
                self._roll_back()

    def _resume(self, verdict: Localized) -> bool:
        self._enters('post-step')
        committed = self._protection.memory.ledger.get(verdict.target)
        goes_on = self._trainer.loop.finish_post_step(verdict.target, self._others(), committed)
        faults.point(Phase.RESUME)
        # Copying ranks lack the current window and a log, judged replays the current window.
        if verdict.copies or self._protection.stops:
            self._protection.begin_window(verdict.target)
        self._position.resumed()
        self._refused.clear()  # new captures reuse the names
        self._lost_sources = 0
        self._membership.committed = self._rank.events.iteration = verdict.target
        replays = self._rank.number in verdict.ranks
        verified = self.verification.result() if replays else Verified(0, NOWHERE, ())
        last = self._rank.number == self._rank.world_size - 1  # one rank reports for all
        if replays and (last or verified.differing or not verdict.together):
            print(recovered_line(verdict.target, self._replay.replayed, verified), flush=True)
        self._rank.events.emit(
            Recovered(
                scope=GLOBAL if verdict.together else LOCALIZED,
                target=verdict.target,
                stages=sorted(verdict.stages),
                replacements=sorted(verdict.replacements),
                copied=sorted(verdict.copies),
                replayed=self._replay.replayed if replays else 0,
                went_on=self._went_on if replays else 0,
                verified=verified.verified,
                verified_at=verified.verified_at,
                differing=list(verified.differing),
                iterations=verified.iterations,
                seconds={name: round(value, 3) for name, value in vars(self._phases).items()},
            )
        )
        self._outage.is_over(
            self._membership.store, verdict, self._membership.reports, self._phases.in_words()
        )
        self._first_iteration = True
        self._enters('first-iteration')
        return goes_on


def _no_iteration(iteration: int) -> NoReturn:
    raise AssertionError(f'nothing is left to train after iteration {iteration}')
