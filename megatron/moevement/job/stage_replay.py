# SPDX-License-Identifier: Apache-2.0
"""Replays a lost pipeline stage from its window and its neighbours' logs (paper section 3.4).

All ranks of the stage convert the window to a dense state and go on to the newest committed
iteration. What the stage received then is fetched ahead from the logs of the stages before and
after it; if such a stage replays as well, its log is filled while it is read. What the stage sends
goes into its own log only, which is complete again afterwards.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from megatron.moevement.job.conversion import Conversion
from megatron.moevement.job.protection import Protection
from megatron.moevement.seams.data_position import DataPosition
from megatron.moevement.seams.p2p import BoundaryCommunicator, receives_per_iteration
from megatron.moevement.state import iteration_state
from megatron.moevement.state.global_scalars import GlobalScalars, ScalarRecorder
from megatron.moevement.state.iteration_state import IterationState
from megatron.moevement.state.training_state import TrainingState
from moevement_ext import faults
from moevement_ext.errors import SparseCheckpointError
from moevement_ext.faults import Phase
from moevement_ext.membership.report import Report
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.upstream_log.record import CorruptLog, Direction
from moevement_ext.memory.window.name import Candidate, HeldWindow, RankIdentity
from moevement_ext.memory.window.refused import RefusedWindow
from moevement_ext.recover.rank_state import RankState
from moevement_ext.recover.sources import ArrivingWindow
from moevement_ext.recover.verdict import Localized
from moevement_ext.replicate.client import PeerRefused
from moevement_ext.replicate.log_reader import LogReader


class WindowRefused(SparseCheckpointError):
    """What this rank needs to replay the window cannot be had; another window is to be tried."""


_DAMAGES = (RefusedWindow, CorruptLog, PeerRefused)


class StageReplay:
    """Replays the stage of this rank. Training thread only, but for `interrupt`.

    Args:
        args: upstream's arguments.
        identity: of this rank in this run.
        training: model and optimizer.
        protection: windows, ledger and log of this rank.
        recorder: plays recorded scalars back.
        data: moves the data iterators.
        communicator: of the pipeline.
        enters: called with the name of each phase that begins.
    """

    Refused = WindowRefused

    def __init__(
        self,
        args: Any,
        identity: RankIdentity,
        training: TrainingState,
        protection: Protection,
        recorder: ScalarRecorder,
        data: DataPosition,
        communicator: BoundaryCommunicator,
        enters: Callable[[str], None],
    ) -> None:
        self._args = args
        self._identity = identity
        self._training = training
        self._protection = protection
        self._recorder = recorder
        self._data = data
        self._communicator = communicator
        self._enters = enters
        self._waiting: list[LogReader | ArrivingWindow] = []
        self.fetch_s = self.convert_s = self.catch_up_s = 0.0
        self.replayed = 0

    def interrupt(self) -> None:
        """Wake up a replay that waits for another rank. Called on the watching thread."""
        for waiting in list(self._waiting):
            waiting.close()

    def learn(self, reports: Sequence[Report], stage_of: Sequence[int]) -> None:
        """Take over committed iterations this rank does not know from the others.

        Ranks of the same stage come last: their records fit this rank's optimizers for certain.
        """
        own = stage_of[self._args.rank]
        order = sorted(range(len(reports)), key=lambda rank: stage_of[rank] == own)
        known = {entry.iteration: entry for rank in order for entry in reports[rank].ledger}
        ledger = self._protection.memory.ledger
        for iteration, entry in sorted(known.items()):
            if ledger.get(iteration) is None:
                ledger.append(entry)

    def consumed_samples(self, iteration: int) -> int:
        """Training samples consumed up to and with `iteration`."""
        entry = self._protection.memory.ledger.get(iteration)
        return entry.consumed_samples if entry is not None else self._args.consumed_train_samples

    def run(
        self,
        verdict: Localized,
        reports: Sequence[Report],
        iterate: Callable[[int], Any],
        replay: Callable[[int], Any],
        rank: RankState[IterationState],
    ) -> None:
        """Bring this rank to `verdict.target`. Collective over the replaying ranks.

        Raises:
            WindowRefused: this rank's part of it, or a log that it needs, is damaged wherever it
                is held.
        """
        assert verdict.window is not None
        faults.at_iteration(verdict.window.start + 1)
        faults.point(Phase.FETCH)
        self._enters('fetch')
        self._protection.drain()
        self._protection.expect_captured(verdict.window.start)
        self._protection.stop_capturing()
        inventories = [report.windows for report in reports]
        try:
            with self._arriving(verdict.window, inventories) as source:
                self._replay(Conversion(source), verdict.target, iterate, replay, rank)
        except _DAMAGES as error:
            raise WindowRefused(f'window {verdict.window.start}: {error}') from error

    def _replay(
        self,
        conversion: Conversion,
        target: int,
        iterate: Callable[[int], Any],
        replay: Callable[[int], Any],
        rank: RankState[IterationState],
    ) -> None:
        began = time.perf_counter()
        start = conversion.window.start
        first = conversion.first
        iteration_state.restore_counters(first, self._args)
        self._data.move_training(first.consumed_train_samples)
        self.fetch_s = time.perf_counter() - began
        self._enters('convert')
        with self._from_logs(start, target):
            conversion.run(
                self._training.loader,
                self._training.frozen,
                self._recorder,
                restore=lambda state: self._training.restore(state, self._args),
                replay=replay,
            )
            rank.reached(conversion.last)
            self._protection.verification.check(conversion.last.iteration)
            self._protection.roll_back(conversion)
            self.convert_s = time.perf_counter() - began - self.fetch_s
            self._enters('catch-up')
            self._catch_up(conversion.last.iteration, target, iterate)
            if self._protection.refused():
                verified = self._protection.verification.result()
                raise WindowRefused(f'window {start}, replayed to iteration {target}: {verified}')
            rank.rebuilt()
        get_moe_metrics_tracker().clear()  # the log shows trained iterations only
        self.replayed = target - start
        self.catch_up_s = time.perf_counter() - began - self.fetch_s - self.convert_s

    def _catch_up(self, dense_at: int, target: int, iterate: Callable[[int], Any]) -> None:
        """Train on from the dense state with what the committed iterations recorded."""
        with self._training.frozen.replaying():  # nothing is frozen, but nothing overlaps either
            for iteration in range(dense_at, target):
                faults.at_iteration(iteration + 1)
                faults.point(Phase.CATCH_UP)
                entry = self._entry(iteration + 1)
                scalars = GlobalScalars(entry.grad_norms, entry.overflows, entry.num_tokens)
                with self._recorder.replaying(scalars):
                    iterate(iteration)
                iteration_state.move_to(iteration + 1, entry.consumed_samples, self._args)

    def _entry(self, iteration: int) -> LedgerEntry:
        entry = self._protection.memory.ledger.get(iteration)
        if entry is None:
            raise SparseCheckpointError(
                f'No rank has a record of iteration {iteration}; it cannot be replayed.'
            )
        return entry

    @contextmanager
    def _from_logs(self, start: int, target: int) -> Any:
        """Receive what the neighbours sent in the iterations after `start`."""
        received: dict[Direction, Any] = {}
        neighbours = {
            Direction.DOWN: self._communicator.prev_rank,
            Direction.UP: self._communicator.next_rank,
        }
        with ExitStack() as stack:
            for direction, neighbour in neighbours.items():
                counts = [(t, self._receives(t)[direction]) for t in range(start + 1, target + 1)]
                if any(count for _, count in counts):
                    assert neighbour is not None
                    client = self._protection.memory.client(neighbour)
                    reader = LogReader(client, direction, counts)
                    self._waiting.append(reader)
                    stack.callback(self._close, reader)
                    received[direction] = reader
            stack.enter_context(self._communicator.replaying(received))
            yield

    @contextmanager
    def _arriving(
        self, window: Candidate, inventories: Sequence[Sequence[HeldWindow]]
    ) -> Iterator[ArrivingWindow]:
        """This rank's part of the window, converted while the rest of it is on its way."""
        memory = self._protection.memory
        source = ArrivingWindow(memory, window, inventories, self._identity)
        self._waiting.append(source)
        try:
            yield source
        finally:
            self._close(source)

    def _close(self, waiting: LogReader | ArrivingWindow) -> None:
        self._waiting.remove(waiting)
        waiting.close()

    def _receives(self, iteration: int) -> dict[Direction, int]:
        return receives_per_iteration(
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            len(self._training.model),
            self._entry(iteration).num_microbatches,
        )
