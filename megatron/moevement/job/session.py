# SPDX-License-Identifier: Apache-2.0
"""Sparse checkpointing of one training job, seen from one rank.

Set-up finds the windows of a predecessor and prepares host memory; `train` and `step` convert,
capture, commit, and bring this rank through failures of others (see `local_recovery`). Whose loop
that stands around is the matter of `upstream_trainer` and `attach`.
"""

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.utils import get_model_config

from megatron.moevement.job import identity, log_line, recovery
from megatron.moevement.job.conversion import Conversion
from megatron.moevement.job.local_recovery import LocalRecovery, handovers
from megatron.moevement.job.planning import Planner
from megatron.moevement.job.protection import Protection
from megatron.moevement.seams import upstream
from megatron.moevement.seams.data_position import DataPosition
from megatron.moevement.seams.p2p import BoundaryCommunicator
from megatron.moevement.seams.post_step import PostStep
from megatron.moevement.state import iteration_state, parameter_groups
from megatron.moevement.state.global_scalars import GlobalScalars, ScalarRecorder
from megatron.moevement.state.iteration_state import IterationState
from megatron.moevement.state.operation_count import CountedOperations, OperationCount
from megatron.moevement.state.training_state import TrainingState
from moevement_ext import faults
from moevement_ext.config import SparseCheckpointConfig, node_name
from moevement_ext.events import EventLog
from moevement_ext.membership.exchange import Exchange
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.report import NOWHERE
from moevement_ext.memory.budget import HostMemoryError
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.slot import SlotContext
from moevement_ext.recover.rank_state import RankState

logger = logging.getLogger(__name__)

LOOP_ENDS = object()
"""What `Session.step` returns when the loop is to end where it is."""


class Session:
    """All of sparse checkpointing in this process; the training thread calls the methods.

    Args:
        args: upstream's parsed arguments, or what stands for them.
        config: the `--sparse-ckpt-*` flags.
        membership: this process among the others; None where a failure restarts the whole job.
        data: where the data of this rank go on.
        post_step: what the loop does after an iteration.
        operations: floating point operations so far, for upstream's own count.
    """

    def __init__(
        self,
        args: Any,
        config: SparseCheckpointConfig,
        membership: Membership | None,
        data: DataPosition,
        post_step: PostStep,
        operations: OperationCount,
    ) -> None:
        self._args = args
        self._config = config
        self._run_id = identity.run_name(args, config)
        self._identity = RankIdentity(
            identity.run_identity(args, self._run_id), identity.topology_identity(args), args.rank
        )
        self._events = EventLog(config.events, args.rank)
        self._recorder = ScalarRecorder()
        self._membership = membership
        self.joining = membership is not None and membership.joining
        """This process takes the place of a lost one in a running job."""
        self._exchange = Exchange(membership.archive if membership else None, self.joining)
        self._data = data
        self._post_step = post_step
        self._operations = operations
        self._local: LocalRecovery | None = None
        self._alone = ExitStack()
        self._running: int | None = None
        self._trained = False
        self._protection: Protection | None = None
        self._conversion: Conversion | None = None
        self._phases = recovery.Phases()
        self._catch_up_to = NOWHERE
        self._caught_up_from = 0.0
        self._replayed_from = -1

    def begin(self) -> None:
        """Called once, before `torch.distributed` is initialised."""
        self._recorder.install()
        faults.arm(self._args.rank)
        if self.joining:
            self._alone.enter_context(upstream.without_connections(self._args))
        self._events.emit('worker_started')

    @property
    def committed(self) -> int:
        """Iterations committed on this rank."""
        return self._events.iteration

    @property
    def kept_in(self) -> Path | None:
        """Where windows of this rank are, None while training is unprotected."""
        return None if self._protection is None else self._protection.memory.store.path

    def close(self, remove: bool = True) -> None:
        """The end: stop all threads; with `remove` give the host memory back."""
        self._events.emit('finished', removed=remove)
        if self._protection is not None:
            self._protection.close(remove)
        if self._membership is not None:
            self._membership.close()
        self._events.close()

    # Set-up

    def set_up(
        self,
        build: Callable[[bool], tuple[Any, Any, Any]],
        load_dense: Callable[[Any, Any, Any], None],
    ) -> tuple[Any, Any, Any]:
        """Build model chunks, optimizer and scheduler; recover from host memory where that is best.

        Args:
            build: builds them; told whether to load the newest dense checkpoint as well.
            load_dense: loads it into what was built; after a recovery from memory proved
                impossible.
        """
        predecessor = self._find()
        from_memory = self.joining or bool(predecessor.candidates)
        with parameter_groups.of_all_ranks(self._exchange):
            model, optimizer, scheduler = build(not from_memory)
        self._training = TrainingState(model, optimizer, scheduler)
        self._planner = Planner(self._training, self._exchange, self._args)
        self._protect(required=from_memory)
        if predecessor.candidates and not self._obtain(predecessor):
            load_dense(model, optimizer, scheduler)
            self._training.renew()
        return model, optimizer, scheduler

    def _find(self) -> recovery.Predecessor:
        """What an earlier life of the whole job left; a joining process takes part in this one."""
        if self.joining:
            return recovery.Predecessor([], [], -1)
        began = time.perf_counter()
        store = NodeStore(Path(self._config.dir), self._run_id, node_name())
        found = recovery.find(store, self._identity, self._args, self._events, self._exchange)
        self._phases.find = time.perf_counter() - began
        return found

    def _protect(self, required: bool) -> None:
        """Reserve host memory and connect to the peers; without it training is unprotected.

        Args:
            required: there are windows to recover from; going on without them would lose progress.
        """
        try:
            self._protection = Protection(
                self._args, self._config, self._run_id, self._identity, self._planner,
                self._training, self._events, context_bytes=self._context_bytes(),
                exchange=self._exchange, localized=self._membership is not None,
            )  # fmt: skip
        except HostMemoryError as error:  # on all ranks or on none
            if required or self._config.strict or self._config.host_memory_gb is not None:
                raise
            self._events.emit('protection_reduced', reason=str(error))
            logger.warning('sparse checkpointing: TRAINING IS UNPROTECTED: %s', error)
            return
        if self._protection.memory.first_on_node():
            print(log_line.memory_line(self._protection.memory), flush=True)

    def _obtain(self, predecessor: recovery.Predecessor) -> bool:
        """Fetch and verify the window to convert; go to where its replay starts."""
        assert self._protection is not None  # it was required
        began = time.perf_counter()
        self._protection.expect_captured(predecessor.candidates[0].start)
        self._conversion = recovery.obtain(
            self._protection.memory, predecessor, self._identity, self._args, self._events,
            self._exchange, self._training.loader.check,
        )  # fmt: skip
        self._phases.obtain = time.perf_counter() - began
        if self._conversion is None:
            return False
        first, last = self._conversion.first, self._conversion.last
        self._catch_up_to = max(predecessor.committed, last.iteration)
        self._replayed_from = first.iteration
        self._events.emit('recovery_started', start=first.iteration, dense_at=last.iteration)
        # The data iterators are built next: training data from where the replay starts,
        # validation data from where it ends (a replay does not evaluate).
        iteration_state.restore_counters(first, self._args)
        self._args.consumed_valid_samples = last.consumed_valid_samples
        return True

    def _context_bytes(self) -> int:
        """Upper bound of the encoded small state; RNG states have a fixed size."""
        state = self._state(0, GlobalScalars([0.1] * 64, [False] * 64))
        context = SlotContext([], [], iteration_state.encode(state))
        return len(context.state) + 4096

    # Training

    def train(self, run: Callable[[], Any]) -> Any:
        """The training loop, started where the window becomes dense; again after failures."""
        self._alone.close()
        if self._protection is None:
            return run()
        self._start(self._protection)
        self._training.around_update(
            self._protection.checkpointer.before_update, self._updating, self._stepped
        )
        if self._membership is None:
            result = run()
        else:
            result = self._train_among(self._membership, run)
        self._trained = True
        self._protection.drain()
        return result

    def _start(self, protection: Protection) -> None:
        """Begin to capture, with the plan of the job this process joins or with a first one."""
        store = own_store(self._membership, self._exchange)
        if self._membership is not None and self.joining:
            in_force = handovers(self._membership.reports)[0].plan
            protection.start(
                protection.agreed_plan(in_force.version, in_force.origin, store), store
            )
            return
        if self._conversion is not None:
            iteration_state.restore_counters(self._conversion.last, self._args)
        self._operations.base = CountedOperations(
            self._args.consumed_train_samples,
            float(self._args.num_floating_point_operations_so_far),
        )
        protection.start(protection.first_plan(self._args.iteration), store)
        if self._conversion is not None:
            protection.replicate_again(self._conversion)
        else:
            protection.forget_the_past()

    def _train_among(self, membership: Membership, run: Callable[[], Any]) -> Any:
        assert self._protection is not None
        self._communicator = BoundaryCommunicator(
            parallel_state.get_pipeline_model_parallel_group(),
            get_model_config(self._training.model[0]),
            self._protection.memory.log,
        )
        self._groups = upstream.groups()
        self._local = LocalRecovery(
            self._args, membership, self._identity, self._training, self._planner,
            self._protection, self._recorder, self._data, self._post_step, self._communicator,
            self._events, self._rank_state(membership), self._operations,
        )  # fmt: skip
        return self._local.train(run)

    def _rank_state(self, membership: Membership) -> RankState[IterationState]:
        """What this rank has when its training loop is entered for the first time."""
        if membership.joining:
            return RankState(NOWHERE)
        if self._conversion is not None:
            return RankState(self._conversion.last.iteration)
        iteration = self._args.iteration
        return RankState(iteration, self._state(iteration, self._recorder.peek()))

    def failed_after_training(self, error: Exception) -> None:
        """The program has failed; if another rank died, and training is over, all start again."""
        if self._local is not None and self._trained and self._local.caused_by_others(error):
            self._local.give_up('a worker died after the last iteration')

    def step(self, train_step: Callable[..., Any], iteration: int) -> Any:
        """The iteration after `iteration`, after what a failure has left to do.

        Args:
            train_step: called as `train_step(iteration=, **schedule)`, perhaps for several
                iterations; `schedule` is what the pipeline schedule is to be given.
        """
        self._recorder.stand_around(get_model_config(self._training.model[0]))
        step = partial(self._step, train_step)
        if self._local is not None and self._local.pending():
            self._drop_conversion()
            self._local.carry_out(partial(self._iterate, step), step)
            if self._post_step.exits(iteration):
                return LOOP_ENDS
        elif self._conversion is not None:
            self._convert(self._conversion, step)
        return self._iterate(step, iteration)

    def _step(self, train_step: Callable[..., Any], iteration: int) -> Any:
        if self._local is None:
            return train_step(iteration=iteration)
        self._communicator.at_iteration(iteration + 1)
        return train_step(
            iteration=iteration, p2p_communicator=self._communicator, pg_collection=self._groups
        )

    def _iterate(self, step: Callable[[int], Any], iteration: int) -> Any:
        """One iteration: capture its starting point, run it, note what it committed."""
        if self._protection is None:
            return step(iteration)
        with self._protection.exposed():
            state = self._state(iteration, self._recorder.take())
            if self._local is not None:
                self._local.begin(state)
            self._protection.begin(iteration, iteration_state.encode(state))
        self._running = iteration
        try:
            result = step(iteration)
        finally:
            self._running = None
        with self._protection.exposed():
            self._protection.end(iteration + 1)
        return result

    def _updating(self) -> None:
        """The optimizer begins to write."""
        if self._local is not None and self._running is not None:
            self._local.updating()

    def _stepped(self, successful: bool) -> None:
        """The optimizer is done; in a conversion nothing is committed by that."""
        if self._running is not None:
            self._commit(self._running + 1, skipped=not successful)

    def _convert(self, conversion: Conversion, step: Callable[..., Any]) -> None:
        conversion.run(
            self._training.loader,
            self._training.frozen,
            self._recorder,
            restore=lambda state: self._training.restore(state, self._args),
            replay=step,
        )
        self._conversion = None
        if self._local is not None:
            self._local.converted(conversion.last)
        assert self._protection is not None
        self._events.iteration = conversion.last.iteration
        self._protection.verification.check(conversion.last.iteration)
        get_moe_metrics_tracker().clear()  # the log shows trained iterations only
        self._phases.load, self._phases.convert = conversion.load_s, conversion.replay_s
        self._caught_up_from = time.perf_counter()
        if self._args.rank == self._args.world_size - 1:
            print(log_line.conversion_line(conversion.first, conversion.last), flush=True)
        if self._catch_up_to <= conversion.last.iteration:
            self._recovered()

    def _drop_conversion(self) -> None:
        """A failure cut off the conversion of all stages; what to replay was decided anew."""
        if self._conversion is not None:
            self._conversion = None
            self._catch_up_to = NOWHERE

    def _state(self, iteration: int, scalars: GlobalScalars) -> IterationState:
        training = self._training
        return iteration_state.capture(
            self._args, iteration, training.optimizer, training.scheduler, scalars,
            self._operations.at(self._args.consumed_train_samples),
        )  # fmt: skip

    def _commit(self, iteration: int, skipped: bool) -> None:
        """Iteration `iteration` is committed on this rank: its update is written.

        Upstream moves the scheduler and counts the samples only later, when its own reductions of
        what to log are through; a failure in those must not undo the iteration.
        """
        assert self._protection is not None
        num_microbatches = get_num_microbatches()
        samples = self._args.data_parallel_size * self._args.micro_batch_size * num_microbatches
        state = self._state(iteration, self._recorder.peek())
        state.consumed_train_samples += samples
        state.floating_point_operations = self._operations.at(state.consumed_train_samples)
        state.scheduler_steps += 0 if skipped else samples
        self._protection.memory.ledger.append(
            LedgerEntry(
                iteration=iteration,
                grad_norms=state.scalars.grad_norms,
                overflows=state.scalars.overflows,
                num_microbatches=num_microbatches,
                consumed_samples=state.consumed_train_samples,
                num_tokens=state.scalars.num_tokens,
            )
        )
        self._events.iteration = iteration
        self._protection.verification.check(iteration)
        if self._local is not None:
            self._local.stepped(state)
        if iteration == self._catch_up_to:
            self._recovered()

    def _recovered(self) -> None:
        assert self._protection is not None
        self._phases.catch_up = time.perf_counter() - self._caught_up_from
        verified = self._protection.verification.result()
        replayed = self._catch_up_to - self._replayed_from
        self._events.emit(
            'recovered',
            replayed=replayed,
            **verified._asdict(),
            seconds=log_line.phase_seconds(self._phases),
        )
        print(log_line.recovered_line(self._catch_up_to, replayed, verified), flush=True)
        if self._protection.refused():
            recovery.refuse(self._protection.memory, verified, self._args, self._events)

    # Reporting

    def report(self, iteration: int) -> None:
        """Say in the log how protection goes, if iteration `iteration` ends a log interval."""
        if self._protection is not None and iteration % self._args.log_interval == 0:
            log_line.log_interval(self._args, iteration, self._protection.checkpointer)


def own_store(membership: Membership | None, exchange: Exchange) -> torch.distributed.Store:
    """The launcher's store under a name of this life of the job, by a connection of its own."""
    if membership is not None:
        return membership.archive
    default = torch.distributed.distributed_c10d._get_default_store()
    life = exchange('life', secrets.token_hex(8).encode())[0].decode()
    return torch.distributed.PrefixStore(f'sparse-ckpt/{life}', default.clone())
