# SPDX-License-Identifier: Apache-2.0
"""Sparse checkpointing of one training job, seen from one rank.

Stands around four functions of upstream's trainer (see `upstream.py`): set-up finds the windows of
a predecessor and prepares host memory, `train` and `train_step` convert, capture and commit,
`training_log` reports.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from megatron.moevement import identity, iteration_state, recovery, report, upstream
from megatron.moevement.conversion import Conversion
from megatron.moevement.global_scalars import GlobalScalars, ScalarRecorder
from megatron.moevement.iteration_state import IterationState
from megatron.moevement.planning import Planner
from megatron.moevement.protection import Protection
from megatron.moevement.training_state import TrainingState, armed_forward
from moevement_ext.checkpointer import Identity
from moevement_ext.config import SparseCheckpointConfig, node_name
from moevement_ext.memory.budget import HostMemoryError
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.store import NodeStore
from moevement_ext.observe.events import EventLog
from moevement_ext.recover.context import SlotContext
from moevement_ext.testing import faults

logger = logging.getLogger(__name__)


class Session:
    """All of sparse checkpointing in this process; the training thread calls the methods.

    Args:
        args: upstream's parsed arguments.
        config: the `--sparse-ckpt-*` flags.
    """

    def __init__(self, args: Any, config: SparseCheckpointConfig) -> None:
        self._args = args
        self._config = config
        self._run_id = identity.run_name(args, config)
        self._identity = Identity(
            identity.run_identity(args, self._run_id), identity.topology_identity(args), args.rank
        )
        self._events = EventLog(config.events, args.rank)
        self._recorder = ScalarRecorder()
        self._protection: Protection | None = None
        self._conversion: Conversion | None = None
        self._phases = recovery.Phases()
        self._catch_up_to = -1
        self._caught_up_from = 0.0
        self._replayed_from = -1

    def install(self) -> None:
        """Stand around upstream's functions. Called once, before `pretrain`.

        Raises:
            InstallationError: upstream is not the one this package was checked against.
        """
        upstream.check()
        self._recorder.install()
        faults.arm(self._args.rank)
        upstream.wrap('setup_model_and_optimizer', self._set_up)
        upstream.wrap('train', self._train)
        upstream.wrap('train_step', self._train_step)
        upstream.wrap('training_log', self._training_log)
        self._events.emit('worker_started')

    def close(self) -> None:
        """Clean exit: stop all threads and give the host memory back."""
        self._events.emit('finished')
        if self._protection is not None:
            self._protection.close()
        self._events.close()

    # Set-up

    def _set_up(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Build model and optimizer; recover from host memory where that is the best tier."""
        began = time.perf_counter()
        store = NodeStore(Path(self._config.dir), self._run_id, node_name())
        predecessor = recovery.find(store, self._identity, self._args, self._events)
        self._phases.find = time.perf_counter() - began
        load = self._args.load
        if predecessor.candidates:
            self._args.load = None  # host memory is newer; the disk stays the next tier
        try:
            model, optimizer, scheduler = original(*args, **kwargs)
        finally:
            self._args.load = load
        self._training = TrainingState(model, optimizer, scheduler)
        self._planner = Planner(self._training)
        self._protect(required=bool(predecessor.candidates))
        if predecessor.candidates and not self._obtain(predecessor) and load is not None:
            upstream.load_dense_checkpoint(
                self._args, model, optimizer, scheduler, kwargs.get('checkpointing_context')
            )
        return model, optimizer, scheduler

    def _protect(self, required: bool) -> None:
        """Reserve host memory and connect to the peers; without it training is unprotected.

        Args:
            required: there are windows to recover from; going on without them would lose progress.
        """
        try:
            self._protection = Protection(
                self._args, self._config, self._run_id, self._identity, self._planner,
                self._training, self._events, context_bytes=self._context_bytes(),
            )  # fmt: skip
        except HostMemoryError as error:  # on all ranks or on none
            if required or self._config.strict or self._config.host_memory_gb is not None:
                raise
            self._events.emit('protection_reduced', reason=str(error))
            logger.warning('sparse checkpointing: TRAINING IS UNPROTECTED: %s', error)
            return
        if self._protection.memory.first_on_node():
            print(report.memory_line(self._protection.memory), flush=True)

    def _obtain(self, predecessor: recovery.Predecessor) -> bool:
        """Fetch and verify the window to convert; go to where its replay starts."""
        assert self._protection is not None  # it was required
        began = time.perf_counter()
        self._conversion = recovery.obtain(
            self._protection.memory, predecessor, self._identity, self._args, self._events
        )
        self._phases.obtain = time.perf_counter() - began
        if self._conversion is None:
            return False
        first, last = self._conversion.first, self._conversion.last
        self._catch_up_to = max(predecessor.committed, last.iteration)
        self._replayed_from = first.iteration
        self._events.emit('recovery_started', start=first.iteration, dense_at=last.iteration)
        # Upstream builds the data iterators next: training data from where the replay starts,
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

    def _train(
        self, original: Callable[..., Any], forward_step: Any, model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Upstream's loop, started where the window becomes dense."""
        if self._conversion is not None:
            iteration_state.restore_counters(self._conversion.last, self._args)
        if self._protection is not None:
            self._protection.start(self._args.iteration, self._conversion)
            self._training.before_update(self._protection.checkpointer.before_update)
        if faults.armed():
            forward_step = armed_forward(forward_step)
        result = original(forward_step, model, *args, **kwargs)
        if self._protection is not None:
            self._protection.drain()
        return result

    def _train_step(
        self,
        original: Callable[..., Any],
        forward_step: Any,
        data_iterator: Any,
        *args: Any,
        iteration: int,
        **kwargs: Any,
    ) -> Any:
        """One iteration: capture its starting point, run it, note what it committed."""
        step = partial(original, forward_step, data_iterator, *args, **kwargs)
        if self._conversion is not None:
            self._convert(self._conversion, step)
            self._conversion = None
        if self._protection is None:
            return step(iteration=iteration)
        with self._protection.exposed():
            state = self._state(iteration, self._recorder.take())
            self._protection.begin(iteration, iteration_state.encode(state))
        result = step(iteration=iteration)
        with self._protection.exposed():
            self._protection.end(iteration + 1)
            self._commit(iteration + 1, skipped=bool(result[1]))
        return result

    def _convert(self, conversion: Conversion, step: Callable[..., Any]) -> None:
        conversion.run(
            self._training.loader,
            self._training.frozen,
            self._recorder,
            restore=self._restore,
            replay=lambda iteration: step(iteration=iteration),
        )
        get_moe_metrics_tracker().clear()  # the log shows trained iterations only
        self._recorder.take()
        self._phases.load, self._phases.convert = conversion.load_s, conversion.replay_s
        self._caught_up_from = time.perf_counter()
        if self._args.rank == self._args.world_size - 1:
            print(report.conversion_line(conversion.first, conversion.last), flush=True)
        if self._catch_up_to <= conversion.last.iteration:
            self._recovered()

    def _state(self, iteration: int, scalars: GlobalScalars) -> IterationState:
        training = self._training
        return iteration_state.capture(
            self._args, iteration, training.optimizer, training.scheduler, scalars
        )

    def _restore(self, state: IterationState) -> None:
        training = self._training
        iteration_state.restore(state, self._args, training.optimizer, training.scheduler)

    def _commit(self, iteration: int, skipped: bool) -> None:
        """Iteration `iteration` is committed on this rank."""
        assert self._protection is not None
        group = self._training.optimizer.param_groups[0]
        num_microbatches = get_num_microbatches()
        # Upstream counts the samples of an iteration after `train_step` has returned.
        samples = self._args.data_parallel_size * self._args.micro_batch_size * num_microbatches
        scalars = self._recorder.peek()  # the state of the next iteration takes them
        self._protection.memory.ledger.append(
            LedgerEntry(
                iteration=iteration,
                grad_norms=scalars.grad_norms,
                overflows=scalars.overflows,
                skipped=skipped,
                num_microbatches=num_microbatches,
                consumed_samples=self._args.consumed_train_samples + samples,
                scheduler_steps=self._training.scheduler.num_steps,
                learning_rate=group['lr'],
                weight_decay=group['weight_decay'],
            )
        )
        self._events.iteration = iteration
        if iteration == self._catch_up_to:
            self._recovered()

    def _recovered(self) -> None:
        self._phases.catch_up = time.perf_counter() - self._caught_up_from
        self._events.emit(
            'recovered',
            replayed=self._catch_up_to - self._replayed_from,
            seconds=report.phase_seconds(self._phases),
        )

    # Reporting

    def _training_log(
        self,
        original: Callable[..., Any],
        loss_dict: Any,
        total_loss_dict: Any,
        learning_rate: Any,
        iteration: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        result = original(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)
        if self._protection is not None and iteration % self._args.log_interval == 0:
            report.log_interval(self._args, iteration, self._protection.checkpointer)
        return result
