# SPDX-License-Identifier: Apache-2.0
"""Puts the engine together for one rank: host memory, replication, persistence and capture."""

import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch

from megatron.moevement.job.conversion import Conversion
from megatron.moevement.job.planning import Planner
from megatron.moevement.seams.p2p import logged_bytes_per_iteration
from megatron.moevement.state.popularity import TokenCounter
from megatron.moevement.state.training_state import TrainingState
from moevement_ext.capture.checkpointer import ScheduledPlan, SparseCheckpointer
from moevement_ext.config import AUTO, OFF, STOP, SparseCheckpointConfig
from moevement_ext.events import EventLog
from moevement_ext.membership.exchange import Exchange
from moevement_ext.memory.budget import HostMemoryError
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.generations import GENERATIONS
from moevement_ext.memory.window.name import RankIdentity, WindowName
from moevement_ext.plan.byte_planner import hideable_budget
from moevement_ext.plan.replanning import PlanParameters, WindowLoad, decide
from moevement_ext.protect.persistence import PersistenceBoard
from moevement_ext.protect.replanner import Replanner, published_plan
from moevement_ext.recover.verification import Verification
from moevement_ext.replicate.host_memory import HostMemory, Share
from moevement_ext.replicate.replicator import Replicator

logger = logging.getLogger(__name__)

_FIRST_WINDOW = 2  # of `auto`, until times are measured: the first window is persisted soon
_LATE_ITERATIONS = 4  # that persisting a window may lag behind, for the log to reach back


class Protection:
    """The engine of one rank. Construction is collective.

    Args:
        args: upstream's arguments.
        config: the `--sparse-ckpt-*` flags.
        run_id: directory name of the run.
        rank_identity: of this rank in this run.
        planner: plans the windows of all stages.
        training: what is captured.
        events: event log of the rank.
        context_bytes: upper bound of the small state that travels with a slot.
        exchange: with all ranks, or with what they left for a process that joins them.
        localized: keep a log of what this stage sends.

    Raises:
        HostMemoryError: this or another rank cannot reserve its host memory.
    """

    def __init__(
        self,
        args: Any,
        config: SparseCheckpointConfig,
        run_id: str,
        rank_identity: RankIdentity,
        planner: Planner,
        training: TrainingState,
        events: EventLog,
        context_bytes: int,
        exchange: Exchange,
        localized: bool,
    ) -> None:
        self._args = args
        self._config = config
        self._identity = rank_identity
        self._planner = planner
        self._training = training
        self._events = events
        self._counter = TokenCounter(training.model, training.device)
        self._tokens: dict[str, int] = {}
        self._seconds: list[float] = []
        self._windows_seen = 0
        self._slot = 0
        self._step_began = 0.0
        if config.window == AUTO:
            planner.compare_windows(config.longest_window, exchange)
        capacity = planner.capacity(config.longest_window, context_bytes)
        # A window may become persisted only when its successor is nearly complete.
        self.log_iterations = 2 * config.longest_window + _LATE_ITERATIONS
        per_iteration = logged_bytes_per_iteration(args, len(training.model)) if localized else 0
        self.memory = self._reserve(run_id, capacity, self.log_iterations * per_iteration, exchange)
        self.memory.connect(partial(exchange, 'addresses'))
        self.verification = Verification((), {})

    @property
    def present(self) -> PlanParameters:
        """The plan in force."""
        schedule = self.checkpointer.schedule
        return self._parameters[schedule.origin, schedule.digest]

    def first_plan(self, iteration: int) -> PlanParameters:
        """What a job begins with at `iteration`."""
        window = self._config.longest_window
        if self._config.window == AUTO:
            window = min(window, _FIRST_WINDOW)
        return PlanParameters(0, iteration, window, {})

    def agreed_plan(
        self, version: int, origin: int, store: torch.distributed.Store
    ) -> PlanParameters:
        """The plan that a running job has in force.

        Args:
            version: of the plan.
            origin: where its windows begin.
            store: the one that the others gave to `start`.
        """
        return msgspec.structs.replace(published_plan(store, version), origin=origin)

    def start(self, present: PlanParameters, store: torch.distributed.Store) -> None:
        """Begin to capture.

        Args:
            present: the plan to capture by.
            store: for this life of the job, the same on all ranks; a connection of its own.
        """
        self._parameters: dict[tuple[int, str], PlanParameters] = {}
        self._reached = self.memory.peer_addresses()
        self._replicator = Replicator(
            self._identity.rank,
            self.memory.peers(),
            self._replicated,
            self._degraded,
            max_windows=GENERATIONS,
        )
        self.checkpointer = SparseCheckpointer(
            self._identity,
            self._training.slices,
            self.memory.windows,
            self._replicator,
            self._schedule(present),
            self._training.device,
            self._events,
            self._config.max_wait,
            self._report,
        )
        world_size = self._args.world_size
        self._board = PersistenceBoard(store, self._identity.rank, world_size, self._persisted)
        self._replanner = Replanner(
            store.clone(), self._identity.rank, world_size, present, self._decide, self._adopt
        )

    def forget_the_past(self) -> None:
        """What is still there belongs to a past that is not continued."""
        self.memory.windows.discard_after(-1)
        self._replicator.discard_after(-1)

    def expect_captured(self, start: int) -> None:
        """A recovery from the window at `start` begins: what is newer tells if it is exact."""
        if self._config.verify != OFF:
            captured = self.memory.captured_after(start)
            self.verification = Verification(captured, self._training.slices)

    def refused(self) -> bool:
        """True if what was recovered differs and is not to be gone on from."""
        return self._config.verify == STOP and bool(self.verification.result().differing)

    def stop_capturing(self) -> None:
        """Nothing reads the state of this rank any more, so that it can be loaded anew."""
        self.checkpointer.stop_capturing()

    def rewind_log(self, iteration: int) -> None:
        """What this stage sends after `iteration` is logged again."""
        if self.memory.log is not None:
            self.memory.log.rewind(iteration)

    def roll_back(self, conversion: Conversion) -> None:
        """Go on from this window, which is protected already; later ones are captured again."""
        file = conversion.file()
        name = conversion.window
        self.withdraw_after(name)
        self.memory.windows.persisted(name)
        self.memory.windows.discard_after(name.start)
        self.checkpointer.roll_back(name.start)
        self._replicate_again(name, file)

    def begin_window(self, iteration: int) -> None:
        """Capture by the plan in force from the state after `iteration` on; all ranks do so."""
        self.checkpointer.stop_capturing()
        self.checkpointer.roll_back(iteration - 1)
        self.checkpointer.schedule_next(
            self._schedule(msgspec.structs.replace(self.present, origin=iteration))
        )

    def withdraw_after(self, window: WindowName) -> None:
        """This rank will go back to `window`: nobody relies on its later ones any more."""
        self._replicator.abandon_after(window.start)
        self._board.withdraw_after(window)

    def reach_peers(self, newest: int) -> None:
        """Offer windows again if holders of this rank's replicas have become new processes.

        Args:
            newest: start of the last window to offer; those after it are to be captured anew.
        """
        if self._reached == self.memory.peer_addresses():
            return
        self._reached = self.memory.peer_addresses()
        self._replicator.set_peers(self.memory.peers())
        for window in reversed(self.memory.windows.committed()):
            file = self.memory.windows.file(window.name)
            if file is not None and window.name.start <= newest:
                self._submit(file)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Counts the time within as time that sparse checkpointing takes from training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.checkpointer.statistics.exposed_s += time.perf_counter() - began

    def begin(self, iteration: int, state: bytes) -> None:
        """The state after `iteration` may be captured. Training thread."""
        self.checkpointer.begin(iteration, state)
        schedule = self.checkpointer.schedule
        self._slot = (iteration - schedule.origin) % schedule.plan.window
        self._counter.counting = self._slot == 0 and iteration >= schedule.origin
        self._step_began = time.perf_counter()

    def end(self, iteration: int) -> None:
        """The iteration that led to state `iteration` is over. Training thread."""
        schedule = self.checkpointer.schedule
        self._seconds.append(time.perf_counter() - self._step_began)
        if self._counter.counting:
            self._tokens = self._counter.take()
            self._counter.counting = False
        if self._slot == schedule.plan.window - 1:
            load = WindowLoad(
                iteration - schedule.plan.window,
                self._tokens,
                statistics.median(self._seconds),
                self.checkpointer.copy_bytes_per_s(),
            )
            self._seconds.clear()
            self._windows_seen += 1
            if self._windows_seen > 1:  # the first has warm-up in it
                self._replanner.observe(load)

    def drain(self) -> None:
        """Return when everything captured is sealed; training is over."""
        self.checkpointer.drain()

    def close(self, remove: bool) -> None:
        """Stop all threads; with `remove` delete windows and replicas."""
        if hasattr(self, 'checkpointer'):
            self.checkpointer.stop()
            self._replanner.stop()
            self._replicator.stop()
            self._board.stop()
        self.memory.close(remove)

    def replicate_again(self, conversion: Conversion) -> None:
        """Replicas of the window just recovered from may be gone with a node: offer them again."""
        self._replicate_again(conversion.window, conversion.file())

    def _replicate_again(self, name: WindowName, file: WindowFile) -> None:
        self._replicator.discard_after(name.start)
        self._replicator.persisted(name)
        self._submit(file)

    def _reserve(
        self, run_id: str, capacity: int, log_bytes: int, exchange: Exchange
    ) -> HostMemory:
        """Host memory of this rank; if any rank fails at the start, all do.

        A process that joins a running job, perhaps on another node, does without holding replicas
        for others if that helps; it is needed more than they are.
        """
        share = Share(self._identity.rank, capacity, log_bytes)

        def reserve(share: Share) -> HostMemory:
            return HostMemory(
                self._config, run_id, share, self._training.device, self._degraded,
                partial(exchange, 'members'),
            )  # fmt: skip

        memory: HostMemory | None = None
        problem: HostMemoryError | None = None
        try:
            memory = reserve(share)
        except HostMemoryError as error:
            problem = error
        if problem is not None and exchange.joining:
            memory = reserve(share._replace(hosts_replicas=False))
            reason = f'this rank holds no replicas for others: {problem}'
            logger.warning('sparse checkpointing: protection is reduced: %s', reason)
            self._events.emit('protection_reduced', reason=reason)
        if exchange.all_agree('reserved', memory is not None):
            assert memory is not None
            return memory
        if memory is not None:
            memory.give_up()
        raise problem or HostMemoryError('another rank cannot reserve its host memory')

    def _submit(self, file: WindowFile) -> None:
        for slot in file.slots():
            self._replicator.submit(file, slot)

    def _schedule(self, parameters: PlanParameters) -> ScheduledPlan:
        schedule = self._planner.schedule(parameters.origin, parameters.window, parameters.shares)
        self._parameters[schedule.origin, schedule.digest] = parameters
        return schedule

    def _report(self, window: WindowName) -> None:
        self._board.report(window)

    def _decide(
        self, present: PlanParameters, loads: Sequence[WindowLoad]
    ) -> PlanParameters | None:
        """On rank 0's replanner thread."""
        return decide(
            present,
            loads,
            best_window=self._best_window if self._config.window == AUTO else None,
            change=self._config.reorder_change,
            fraction=self._config.reorder_fraction,
        )

    def _best_window(self, iteration_s: float, bytes_per_s: float) -> int:
        """The fewest slots that hide behind an iteration, at most `--sparse-ckpt-max-window`."""
        window = self._planner.shortest_window(hideable_budget(bytes_per_s, iteration_s))
        if window is None:
            window = self._config.longest_window
            logger.warning(
                'iterations will be longer: no window of up to --sparse-ckpt-max-window %d hides '
                'every slot; allow a longer one, or spread the state over more ranks',
                window,
            )
        return window

    def _adopt(self, parameters: PlanParameters) -> None:
        """On the replanner's thread."""
        self.checkpointer.schedule_next(self._schedule(parameters))
        self._events.emit(
            'replanned', origin=parameters.origin, window=parameters.window,
            version=parameters.version,
        )  # fmt: skip

    def _replicated(self, window: WindowName) -> None:
        self.checkpointer.replicated(window)

    def _persisted(self, window: WindowName) -> None:
        self.checkpointer.persisted(window)
        if self.memory.log is not None:
            self.memory.log.drop_until(window.start)

    def _degraded(self, reason: str) -> None:
        self.checkpointer.degraded(reason)
