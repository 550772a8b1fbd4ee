# SPDX-License-Identifier: Apache-2.0
"""Localized recovery, seen from one rank: survivors keep their state, lost stages replay.

After a failure all ranks meet (see `membership`), come to the same verdict, and enter upstream's
loop at the newest committed iteration; new processes do so for the first time. In the first
`train_step` the lost stages replay (see `stage_replay`), everybody reconnects, and training goes on
(paper section 3.4).
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron.moevement.job import log_line
from megatron.moevement.job.planning import Planner
from megatron.moevement.job.protection import Protection
from megatron.moevement.job.stage_replay import StageReplay
from megatron.moevement.seams import upstream
from megatron.moevement.seams.data_position import DataPosition
from megatron.moevement.seams.p2p import BoundaryCommunicator
from megatron.moevement.seams.post_step import PostStep, PostStepProgress
from megatron.moevement.state import iteration_state
from megatron.moevement.state.broken_iteration import BrokenIteration
from megatron.moevement.state.dp_copy import copy_state
from megatron.moevement.state.global_scalars import ScalarRecorder
from megatron.moevement.state.iteration_state import IterationState
from megatron.moevement.state.operation_count import CountedOperations, OperationCount
from megatron.moevement.state.training_state import TrainingState
from moevement_ext import faults
from moevement_ext.config import node_name
from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.events import EventLog
from moevement_ext.faults import Phase
from moevement_ext.membership.membership import Membership, lost_peer
from moevement_ext.membership.rendezvous import EpochBroken
from moevement_ext.membership.report import NOWHERE, Report
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.window.name import Candidate, RankIdentity, WindowName
from moevement_ext.recover.inventory import held_windows
from moevement_ext.recover.rank_state import RankState, Running
from moevement_ext.recover.verdict import Localized, WholeJob, decide
from moevement_ext.recover.verification import Verified

logger = logging.getLogger(__name__)

_ANNOUNCEMENT_SECONDS = 2.0
_POLL_SECONDS = 0.02


class PlanInForce(msgspec.Struct, frozen=True):
    """A plan by reference: with the shares of thousands of experts it would be most of a report."""

    version: int
    origin: int
    """Where its windows begin now; that of the plan, unless they were begun anew."""


class Handover(msgspec.Struct, frozen=True):
    """What survivors tell a new process besides their report."""

    plan: PlanInForce
    """At the survivor's iteration."""
    progress: PostStepProgress
    """In what follows the newest committed iteration."""
    runs: tuple[int, int, int]
    """Upstream's `do_train`, `do_valid` and `do_test`."""
    operations: CountedOperations
    """Where the count of floating point operations began."""


@dataclass
class Phases:
    """Seconds of each phase of a localized recovery on this rank."""

    detect: float = 0.0
    unblock: float = 0.0
    respawn: float = 0.0
    regroup: float = 0.0
    fetch: float = 0.0
    convert: float = 0.0
    catch_up: float = 0.0


class LocalRecovery:
    """Brings this rank through failures of others, or into the place of a lost one.

    Args:
        args: upstream's arguments.
        membership: this process among the others.
        identity: of this rank in this run.
        training: model and optimizer of this rank.
        planner: knows the stages of all ranks.
        protection: windows, ledger and log of this rank.
        recorder: of the global scalars.
        data: moves the data iterators.
        post_step: does again what follows an iteration.
        communicator: of the pipeline.
        events: event log of the rank.
        rank_state: what this rank has of the training state.
        operations: floating point operations so far, for what upstream logs and saves.
    """

    def __init__(
        self,
        args: Any,
        membership: Membership,
        identity: RankIdentity,
        training: TrainingState,
        planner: Planner,
        protection: Protection,
        recorder: ScalarRecorder,
        data: DataPosition,
        post_step: PostStep,
        communicator: BoundaryCommunicator,
        events: EventLog,
        rank_state: RankState[IterationState],
        operations: OperationCount,
    ) -> None:
        self._args = args
        self._membership = membership
        self._identity = identity
        self._training = training
        self._planner = planner
        self._protection = protection
        self._recorder = recorder
        self._data = data
        self._post_step = post_step
        self._events = events
        self._broken = BrokenIteration(training.model, training.operators)
        self._replay = StageReplay(
            args, identity, training, protection, recorder, data, communicator, self._enters
        )
        self._rank = rank_state
        self._operations = operations
        self._refused: list[Candidate] = []
        self._phases = Phases()
        self._first_iteration = False

    # Notes of the training thread, in every iteration

    def begin(self, state: IterationState) -> None:
        """The iteration after `state` begins."""
        self._raise_if_broken()
        self._rank.begins(state)
        if not self._rank.rebuilding:
            self._broken.begin()

    def updating(self) -> None:
        """The optimizer begins to write.

        Raises:
            EpochBroken: a failure was announced; what was reduced last may be worthless (NCCL's
                waits return when they are aborted).
        """
        self._raise_if_broken()
        self._rank.updating()
        if not self._rank.rebuilding:
            self._membership.not_updating.clear()

    def stepped(self, state: IterationState) -> None:
        """The optimizer has written; `state` is what the next iteration will start from."""
        self._rank.stepped(state)
        if self._rank.rebuilding:  # a stage that catches up is behind until it is all done
            return
        self._membership.not_updating.set()
        self._post_step.begin(state.iteration)
        if self._first_iteration:
            self._first_iteration = False
            self._enters('over')

    def converted(self, state: IterationState) -> None:
        """All stages have converted their windows together, to `state`."""
        self._rank.reached(state)
        self._rank.rebuilt()

    # Around upstream's loop

    def train(self, run: Callable[[], Any]) -> Any:
        """Run the training loop, entering it again after each failure of other ranks.

        Raises:
            Exception: whatever is this rank's own fault.
        """
        self._membership.settle()
        again = self._membership.joining
        if not again:
            self._watch()
        while True:
            try:
                if again:
                    self._enter()
                result = run()
                if self.pending():  # all iterations were committed before the failure
                    self.carry_out(_no_iteration, _no_iteration)
                return result
            except Exception as error:
                if not self.caused_by_others(error):
                    raise
                self._leave(f'{type(error).__name__}: {error}')
            self._meet()
            again = True

    def pending(self) -> bool:
        """A failure is not yet dealt with: `carry_out` comes before the next iteration."""
        return self._rank.pending is not None

    def carry_out(self, iterate: Callable[[int], Any], replay: Callable[[int], Any]) -> None:
        """Replay what was lost and reconnect. In the first `train_step` after entering the loop.

        Args:
            iterate: runs the iteration after the given one and commits it.
            replay: runs it without capture or commit, for frozen operators.

        Raises:
            EpochBroken: another failure came first.
        """
        verdict = self._rank.pending
        assert verdict is not None
        self._watch()
        began = time.perf_counter()
        self._enters('respawn')
        if verdict.window is not None and self._args.rank in verdict.ranks:
            # Before anybody reads this log, or counts what is captured anew: a stage that replays,
            # too, waits for what is sent anew, and its windows count when it has them again.
            self._protection.rewind_log(verdict.window.start)
            self._protection.withdraw_after(WindowName(verdict.window.start, verdict.window.plan))
        self._exchange_addresses(verdict)
        self._phases.respawn += time.perf_counter() - began
        if self._args.rank in verdict.ranks:
            self._replay_stage(verdict, iterate, replay)
        faults.point(Phase.REPLAYED)
        self._membership.barrier('replayed')
        faults.point(Phase.REGROUP)
        began = time.perf_counter()
        self._enters('regroup')
        self._membership.renew(None)
        self._phases.regroup += time.perf_counter() - began
        if self._args.rank not in verdict.ranks | verdict.copies.keys():
            self._put_back()
        self._copy(verdict)
        self._resume(verdict)

    # Failure

    def caused_by_others(self, error: BaseException) -> bool:
        """True if `error` came of the loss of another rank, which may be announced any moment."""
        deadline = time.monotonic() + _ANNOUNCEMENT_SECONDS
        while not (lost_peer(error) or self._membership.broken):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _raise_if_broken(self) -> None:
        if self._membership.broken:
            raise EpochBroken('another rank is gone')

    def _watch(self) -> None:
        self._membership.watch(self._args.distributed_backend, self._replay.interrupt)

    def _enters(self, phase: str) -> None:
        self._events.emit('recovery_phase', phase=phase)

    def _leave(self, reason: str) -> None:
        began = time.perf_counter()
        self._enters('detect')
        self._membership.not_updating.set()
        faults.point(Phase.DETECT)
        self._membership.leave(reason)
        unblock = time.perf_counter() - began
        self._phases = Phases(detect=self._membership.detect_s, unblock=unblock)
        self._events.emit('failure_detected', reason=self._membership.reason)
        logger.warning('sparse checkpointing: recovering: %s', self._membership.reason)

    def _meet(self) -> None:
        began = time.perf_counter()
        self._enters('meet')
        self._membership.meet(self._report)
        self._phases.respawn = time.perf_counter() - began

    def _report(self) -> Report:
        memory = self._protection.memory
        first_logged = memory.log.first_iteration if memory.log is not None else None
        handover = Handover(
            PlanInForce(self._protection.present.version, self._protection.present.origin),
            self._post_step.progress(),
            (self._args.do_train, self._args.do_valid, self._args.do_test),
            self._operations.base,
        )
        return Report(
            survivor=True,
            node=node_name(),
            pid=os.getpid(),
            windows=held_windows(memory.store, self._identity.run, self._identity.topology),
            origin=self._membership.origin,
            committed=self._rank.committed,
            clean_at=self._rank.clean_at,
            first_logged=NOWHERE if first_logged is None else first_logged,
            refused=self._refused,
            address=memory.addresses[self._args.rank],
            ledger=self._entries(),
            details=msgspec.msgpack.encode(handover),
        )

    def _entries(self) -> list[LedgerEntry]:
        """The newest committed iterations, as many as a replay can need."""
        ledger = self._protection.memory.ledger
        newest = self._rank.committed
        oldest = max(newest - self._protection.log_iterations, 0)
        found = [ledger.get(t) for t in range(oldest + 1, newest + 1)]
        return [entry for entry in found if entry is not None]

    def _enter(self) -> None:
        """Decide, and have upstream's loop start at the newest committed iteration."""
        reports = self._membership.reports
        planner = self._planner
        verdict = decide(
            reports,
            planner.stage_of,
            planner.tied,
            self._args.train_iters,
            planner.twins,
            interleaved=len(self._training.model) > 1,
        )
        if isinstance(verdict, WholeJob):
            self.give_up(verdict.reason)
        self._rank.decided(verdict, self._args.rank)
        self._replay.learn(reports, self._planner.stage_of)
        kept = self._rank.kept
        samples = (
            kept.consumed_train_samples
            if kept is not None
            else self._replay.consumed_samples(verdict.target)
        )
        iteration_state.move_to(verdict.target, samples, self._args)
        self._operations.base = handovers(reports)[0].operations
        self._args.num_floating_point_operations_so_far = self._operations.at(samples)
        if not self._membership.joining:
            self._broken.let_go()
            self._post_step.let_go()
        self._membership.silence()
        upstream.fill_first_step_caches(self._training.optimizer)
        self._membership.joining = False

    def give_up(self, reason: str) -> NoReturn:
        """The next tier: all workers end, and the launcher starts the whole job again."""
        self._events.emit('next_tier', reason=reason, tier='the whole job')
        logger.warning('sparse checkpointing: the whole job starts again: %s', reason)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_WHOLE_JOB)

    # Recovery

    def _exchange_addresses(self, verdict: Localized) -> None:
        """Wait until new processes are set up, and learn where they listen."""
        store, memory = self._membership.store, self._protection.memory
        rank = self._args.rank
        if rank in verdict.newcomers:
            encoded = msgspec.msgpack.encode(memory.addresses[rank])
            store.set(f'address/{rank}', encoded)  # type: ignore[arg-type]
        self._membership.barrier('ready')
        for other, theirs in enumerate(self._membership.reports):
            if theirs.address is not None:
                memory.addresses[other] = theirs.address
        for other in verdict.newcomers:
            found = store.get(f'address/{other}')
            memory.addresses[other] = msgspec.msgpack.decode(found, type=tuple[str, int])
        newest = verdict.target
        if verdict.window is not None and rank in verdict.ranks:
            newest = verdict.window.start
        self._protection.reach_peers(newest)

    def _replay_stage(
        self, verdict: Localized, iterate: Callable[[int], Any], replay: Callable[[int], Any]
    ) -> None:
        assert verdict.window is not None
        self._events.emit(
            'recovery_started', start=verdict.window.start, dense_at=verdict.window.dense_at
        )
        began = time.perf_counter()
        self._enters('regroup')
        self._membership.renew(verdict.ranks)
        self._phases.regroup += time.perf_counter() - began
        try:
            self._replay.run(verdict, self._membership.reports, iterate, replay, self._rank)
        except self._replay.Refused as refusal:
            self._refused.append(verdict.window)
            raise EpochBroken(str(refusal)) from refusal
        self._phases.fetch = self._replay.fetch_s
        self._phases.convert = self._replay.convert_s
        self._phases.catch_up = self._replay.catch_up_s

    def _put_back(self) -> None:
        """This rank keeps its state; only what the broken iteration began is undone."""
        state = self._rank.kept
        assert state is not None
        self._training.restore(state, self._args)
        if isinstance(self._rank.position, Running):
            self._broken.put_back()
        self._recorder.put_back(state.scalars)
        self._data.move_training(state.consumed_train_samples)
        if self._protection.memory.log is not None:
            self._protection.memory.log.rewind(state.iteration)
        self._rank.undone()

    def _copy(self, verdict: Localized) -> None:
        """Take the state from a twin, or give it to one."""
        rank, store = self._args.rank, self._membership.store
        for behind, twin in verdict.copies.items():
            if rank == twin:
                assert self._rank.kept is not None  # its state is complete
                encoded = iteration_state.encode(self._rank.kept)
                store.set(f'state/{behind}', encoded)  # type: ignore[arg-type]
        family = {rank, *self._planner.twins[rank]}
        source = next((twin for behind, twin in verdict.copies.items() if behind in family), None)
        if source is None:
            return
        began = time.perf_counter()
        if rank in verdict.copies:
            self._protection.stop_capturing()
        copy_state(self._training.operators, self._training.states, source)
        if rank in verdict.copies:
            self._rank.reached(iteration_state.decode(store.get(f'state/{rank}')))
            self._rank.rebuilt()
            self._put_back()
        self._phases.fetch += time.perf_counter() - began

    def _resume(self, verdict: Localized) -> None:
        """Everybody is connected and at the same iteration."""
        self._enters('post-step')
        self._training.gather_parameters()
        args = self._args
        args.num_floating_point_operations_so_far = self._operations.at(args.consumed_train_samples)
        progress = [handover.progress for handover in handovers(self._membership.reports)]
        committed = self._protection.memory.ledger.get(verdict.target)
        grows = committed is not None and get_num_microbatches() > committed.num_microbatches
        self._post_step.catch_up(verdict.target, progress, self._data, grows)
        faults.point(Phase.RESUME)
        if verdict.copies:  # they have nothing of the present window, nor a log
            self._protection.begin_window(verdict.target)
        self._rank.resumed()
        verified = Verified(0, NOWHERE, ())
        if self._args.rank in verdict.ranks:
            verified = self._protection.verification.result()
            print(
                log_line.recovered_line(verdict.target, self._replay.replayed, verified), flush=True
            )
        self._events.emit(
            'recovered',
            scope='localized',
            target=verdict.target,
            stages=sorted(verdict.stages),
            newcomers=sorted(verdict.newcomers),
            copied=sorted(verdict.copies),
            replayed=self._replay.replayed if self._args.rank in verdict.ranks else 0,
            **verified._asdict(),
            seconds={name: round(value, 3) for name, value in vars(self._phases).items()},
        )
        self._first_iteration = True
        self._enters('first-iteration')


def _no_iteration(iteration: int) -> NoReturn:
    raise AssertionError(f'nothing is left to train after iteration {iteration}')


def handovers(reports: Sequence[Report]) -> list[Handover]:
    """What the survivors hand over."""
    return [
        msgspec.msgpack.decode(report.details, type=Handover)
        for report in reports
        if report.details
    ]
