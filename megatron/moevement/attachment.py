# SPDX-License-Identifier: Apache-2.0
"""Sparse checkpointing for a Megatron-Core training loop that is not upstream's trainer.

    with attach(SparseCheckpointConfig(), model_config, optimizer_config, ddp_config, plan) as job:
        job.init_process_group()
        model, optimizer, scheduler = job.set_up(build)

        def loop():
            while job.iteration < plan.train_iters:
                job.step(train_step)

        job.train(loop, data)

A failure of another rank may interrupt the loop anywhere; `train` then calls the loop again, and
its first `step` brings the job to the newest committed iteration, as in `examples/own_loop.py`.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config

from megatron.moevement.facts import Built, JobFacts, MegatronOptimizer
from megatron.moevement.job.declared import (
    TrainingPlan,
    facts_of_loop,
    refuse_mixed_up_sends,
    refuse_recorded_passes,
    settings_of_loop,
)
from megatron.moevement.job.flags import refuse_unsupported
from megatron.moevement.job.megatron_loop import OperationCount
from megatron.moevement.job.session import Session, protected_job
from megatron.moevement.seams import adam, compiled, patches
from megatron.moevement.seams.schedules import MicroBatches
from megatron.moevement.state.digest import state_digest
from megatron.moevement.state.iteration_state import (
    RngState,
    capture_rng,
    restore_rng,
    rng_kept,
)
from moevement_ext.config import ConfigurationError, SparseCheckpointConfig
from moevement_ext.job import own_device
from moevement_ext.job.digest_file import write_digest
from moevement_ext.job.loop_entry import LoopGoesOn
from moevement_ext.system import leaving


@dataclass
class LoopCounters:
    """The loop's counters; see `megatron.moevement.facts.Counters`."""

    train_iters: int | None
    iteration: int = 0
    curr_iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    num_floating_point_operations_so_far: float = 0.0
    do_train: int = 1
    do_valid: int = 0
    do_test: int = 0


_OPEN_LOADER = 'torch.utils.data:DataLoader.__iter__'


class ReplayableData:
    """Data iterators that can be moved because they can be created again. Training thread only.

    A move leaves the random number generators unchanged. Two operations would change them: creating
    an iterator, and opening a `DataLoader` (which draws a seed). A generator function opens its
    loader only when it is first read, so `reading` also restores the generators in each iteration.

    Attributes:
        training: the iterators that the loop's `data` returned last.
    """

    def __init__(self) -> None:
        self.training: object = None
        self._make: Callable[[int], object] | None = None

    def use(self, make: Callable[[int], object], consumed_samples: int) -> None:
        """Create the first iterators, which start after `consumed_samples`."""
        self._make = make
        self.move_training(consumed_samples)

    def move_training(self, consumed_samples: int) -> None:
        """Create the training iterators again; they continue after `consumed_samples`."""
        assert self._make is not None
        with rng_kept():
            self.training = self._make(consumed_samples)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep random numbers unchanged by loaders that open within the context (one iteration)."""
        reader = threading.get_ident()

        def open_loader(original: Callable[..., object], *args: object) -> object:
            # On another thread, restoring the generators would undo draws of the training thread.
            with rng_kept() if threading.get_ident() == reader else nullcontext():
                return original(*args)

        with patches.wrapped(_OPEN_LOADER, open_loader):
            yield

    def move_validation(self, consumed_samples: int) -> None:
        """Do nothing: the loop moves its own validation data."""


class LoopRandom:
    """Switches the generators between training (in a step) and the loop. Training thread only.

    A stage that replays repeats only the steps, and a failure may interrupt the code between them.
    So draws there (by an evaluation, by opening a loader, by generated samples) must not affect
    training. The loop has a separate stream, which starts as a copy of training's.

    A loop that draws nothing costs two captures of the generators per step.
    """

    def __init__(self) -> None:
        self._training: RngState | None = None
        self._loop: RngState | None = None

    def begin(self) -> None:
        """Begin training with the present generator states."""
        self._training = capture_rng()

    def end(self) -> None:
        """End training; later code continues with training's generators."""
        self._to_training()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Use training's generators within a step; after an error, recovery must restore them."""
        self._to_training()
        self._training = None
        yield
        self._training = capture_rng()
        if self._loop is not None:
            restore_rng(self._loop)

    @contextmanager
    def of_training(self) -> Iterator[None]:
        """Use training's generators within the context, between two steps."""
        with rng_kept():
            if self._training is not None:
                restore_rng(self._training)
            yield

    def _to_training(self) -> None:
        if self._training is None:
            return
        now = capture_rng()
        if now != self._training:
            self._loop = now
            restore_rng(self._training)


@contextmanager
def attach(
    sparse: SparseCheckpointConfig,
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    ddp: DistributedDataParallelConfig,
    plan: TrainingPlan,
    settings: Mapping[str, object] = {},
) -> Iterator['Attachment']:
    """Protect a training job. Every rank calls it, around all use of `torch.distributed`.

    Waits for all ranks that the launcher has started. With GPUs, the process uses the GPU of its
    `LOCAL_RANK`, unless it has selected another GPU before. Host memory is freed when the context
    ends after the last iteration; if the context ends earlier or by an exception, host memory
    stays, and the next launch of the job recovers from it.

    Args:
        sparse: settings; their names are those of the `--sparse-ckpt-*` flags.
        model: configuration of the model that `Attachment.set_up` builds, with the parallel layout.
        optimizer: configuration of the optimizer.
        ddp: configuration of data parallelism.
        plan: batch sizes, sequence length and backend of the loop.
        settings: all else that can change bits, by name, such as data, seed and learning rate;
            compared as text. Windows captured with other settings are refused.

    Raises:
        ConfigurationError: a setting breaks a rule or is not supported; the message names the
            setting.
        UserError: a part of Megatron-Core or torch differs from the one that this package needs.
    """
    own_device.take()
    leaving.leave_in_any_case()
    refuse_mixed_up_sends(model)
    refuse_recorded_passes(model)
    facts = facts_of_loop(model, optimizer, plan)
    every = settings_of_loop(model, optimizer, ddp, plan, facts, settings)
    refuse_unsupported(every)
    patches.check()
    compiled.make_repeatable(
        torch.are_deterministic_algorithms_enabled(), warns=os.environ.get('RANK', '0') == '0'
    )
    adam.repair_loading()
    adam.install_fp8_masters(every)
    counters, data = LoopCounters(plan.train_iters), ReplayableData()
    operations = OperationCount(lambda: 0.0)
    with protected_job(every, facts, counters, sparse, data, operations, own_loop=True) as session:
        yield Attachment(session, facts, counters, data, plan)
        session.job.keeps_windows = counters.iteration < plan.train_iters


@dataclass(eq=False)
class Attachment:
    """One rank's view of a protected job; created by `attach`. Training thread only."""

    _session: Session
    _facts: JobFacts
    _counters: LoopCounters
    _data: ReplayableData
    _plan: TrainingPlan

    def __post_init__(self) -> None:
        self._random = LoopRandom()
        self._updates: list[bool] = []
        self._micro_batches = MicroBatches(self._facts)
        self._micro_batches.install()
        self._connected = False
        self._built: Built | None = None
        self._may_step: bool | None = None

    @property
    def iteration(self) -> int:
        """Number of committed iterations."""
        return self._counters.iteration

    @property
    def consumed_samples(self) -> int:
        """Samples of all ranks in the committed iterations."""
        return self._counters.consumed_train_samples

    def init_process_group(self) -> None:
        """Replace `torch.distributed.init_process_group`; call this before any other connection.

        With NCCL create model-parallel groups with `create_gloo_process_groups=False`.
        """
        self._session.job.init_process_group(self._plan.timeout)
        self._connected = True

    def set_up(
        self,
        build: Callable[[], Built],
        load_checkpoint: Callable[..., tuple[int, int]] | None = None,
        checkpoint_iteration: int | None = None,
    ) -> Built:
        """Build the model, and recover from host memory if it holds windows of this run.

        Args:
            build: creates model-parallel groups, model chunks in `DistributedDataParallel`,
                optimizer and `OptimizerParamScheduler`. A replacement of a lost worker builds
                without its peers: collectives reach no other rank, and their results are not used.
            load_checkpoint: loads a checkpoint of the loop into the built objects; returns the
                iterations and samples of that checkpoint. Called only if no windows are used.
            checkpoint_iteration: iteration of that checkpoint, the same on all ranks: windows of an
                earlier iteration are not used. None: any window is used.

        Raises:
            ConfigurationError: `build` or `load_checkpoint` broke a rule; or the process group is
                not connected yet, or `set_up` was called before.
        """
        if not self._connected or self._built is not None:
            raise ConfigurationError(
                'job.set_up must be called once, after job.init_process_group: call that instead '
                'of torch.distributed.init_process_group, whose groups cannot be reconnected.'
            )

        if checkpoint_iteration is not None and load_checkpoint is None:
            raise ConfigurationError(
                f'job.set_up was given checkpoint_iteration={checkpoint_iteration} without '
                'load_checkpoint, the function that loads that checkpoint; give both.'
            )

        def load(*built: object) -> None:
            if load_checkpoint is not None:
                counters = self._counters
                counters.iteration, counters.consumed_train_samples = load_checkpoint(*built)
                _check_loaded(counters.iteration, checkpoint_iteration)

        def build_and_load(load_dense: bool) -> Built:
            built = build()
            _check_groups(self._plan.backend)
            _check_built(built)
            if load_dense:
                load(*built)
            return built

        _configure_micro_batches(self._facts)
        newest = -1 if checkpoint_iteration is None else checkpoint_iteration
        self._built = self._session.set_up(build_and_load, load, newest)
        self._note_updates(self._built[1])
        return self._built

    def train[Result](self, loop: Callable[[], Result], data: Callable[[int], object]) -> Result:
        """Call `loop`, and again after each failure of other ranks; return the result of `loop`.

        Args:
            loop: calls `step` from `iteration` to the last one. A failure may interrupt code
                between two steps; afterwards some ranks may run that code twice, or not at all.
            data: `data(consumed_samples)` makes the training iterator of this rank, or in an
                interleaved schedule a list of one iterator per model chunk. `consumed_samples`
                counts all ranks.

        Raises:
            ConfigurationError: `set_up` was not called, or training is over.
            SystemExit: with status 0, if `loop` returns without the step that recovers the state.
        """
        if self._built is None:
            raise ConfigurationError('job.train was called before job.set_up; call that first.')
        if self._may_step is not None:
            raise ConfigurationError(
                'job.train was called a second time; a job trains once: do work between iterations '
                'in its loop.'
            )
        self._data.use(data, self._counters.consumed_train_samples)
        self._may_step = True
        self._random.begin()
        try:
            result = cast(Result, self._session.train(partial(self._enter, loop)))
        finally:
            self._may_step = False
        self._random.end()
        return result

    def step[Result](self, train_step: Callable[..., Result]) -> Result:
        """Run the next iteration, which is committed on return. Collective.

        The first step after a start or a failure also calls `train_step` for each iteration to
        replay. Returns the result of the last call.

        Args:
            train_step: called as `train_step(data, **schedule)`: clears gradients, runs Megatron's
                pipeline schedule with `data` and the keywords `schedule`, steps the optimizer once,
                and steps the scheduler by `global_batch_size` if the optimizer step succeeded.

        Raises:
            ConfigurationError: `train_step` breaks these rules; training has not begun, or is over.
        """
        counters = self._counters
        self._check_turn()
        with self._random.step():
            step = partial(self._step, train_step)
            result = cast(Result, self._session.step(step, counters.iteration))
        counters.iteration = counters.curr_iteration = counters.iteration + 1
        counters.consumed_train_samples += self._plan.global_batch_size
        self._session.report(counters.iteration)
        self._session.report_loss(counters.iteration, self._session.around.losses.newest)
        self._session.job.after_steps.run(counters.iteration)
        return result

    def after_step(self, every: int, run: Callable[[int], object]) -> None:
        """Do as `moevement_ext.Job.after_step`; numbers that `run` draws change no others."""

        def keeping(iteration: int) -> None:
            with rng_kept():
                run(iteration)

        self._session.job.after_step(every, keeping)

    def write_digest(self, path: Path) -> None:
        """Write SHA-256 digests of the state, see `tools.compare_digests`. Collective."""
        if self._built is None:
            raise ConfigurationError('job.write_digest was called before job.set_up.')
        with self._random.of_training():
            digest = state_digest(*self._built, self._counters)
        write_digest(str(path), self.iteration, digest)

    def _enter(self, loop: Callable[[], object]) -> object:
        """Call `loop`, and end the program if it returns without the step that recovers."""
        result, job = loop(), self._session.job
        if job.entry.cut_off is None and self.iteration < self._plan.train_iters and job.recovering:
            self._session.leave_before_recovery()
        return result

    def _check_turn(self) -> None:
        if not self._may_step:
            raise ConfigurationError(
                'job.step was called outside of job.train; call it in the loop given to job.train.'
            )
        if self._session.job.entry.cut_off is not None:
            raise LoopGoesOn
        if self.iteration >= self._plan.train_iters:
            raise ConfigurationError(
                f'job.step was called after iteration {self.iteration}, the last of '
                'TrainingPlan.train_iters; call it while job.iteration is below that number: the '
                'loop is called again after a failure.'
            )

    def _note_updates(self, optimizer: MegatronOptimizer) -> None:
        def noted(step: Callable[[], tuple[bool, object, object]]) -> object:
            self._micro_batches.check()
            result = step()
            self._updates.append(bool(result[0]))
            return result

        patches.wrap_object(optimizer, 'step', noted)

    def _step(
        self, train_step: Callable[..., object], iteration: int, **schedule: object
    ) -> object:
        assert self._built is not None
        scheduler = self._built[2]
        before = scheduler.num_steps
        self._updates.clear()
        with self._data.reading(), self._micro_batches.iteration(schedule):
            result = train_step(self._data.training, **schedule)
        if len(self._updates) != 1:
            raise ConfigurationError(
                f'train_step called optimizer.step() {len(self._updates)} times; with sparse '
                'checkpointing it must do so once.'
            )
        stepped = scheduler.num_steps - before
        expected = self._plan.global_batch_size if self._updates[0] else 0
        if stepped != expected:
            raise ConfigurationError(
                f'train_step moved the scheduler by {stepped}, not {expected}; with sparse '
                f'checkpointing it must call scheduler.step(increment='
                f'{self._plan.global_batch_size}), the samples of the iteration, only after a '
                'successful update.'
            )
        return result


def _configure_micro_batches(facts: JobFacts) -> None:
    """Set the global variables that Megatron's own trainer sets at start."""
    num_microbatches_calculator.reconfigure_num_microbatches_calculator(
        facts.rank, None, facts.global_batch_size, facts.micro_batch_size, facts.data_parallel_size
    )
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)


def _check_groups(backend: str) -> None:
    """Refuse groups of two backends: a process that joins a running job cannot distinguish them."""
    if backend != 'gloo' and parallel_state._DATA_PARALLEL_GROUP_GLOO is not None:
        raise ConfigurationError(
            f'build() has created gloo groups in addition to those of {backend}: pass '
            'create_gloo_process_groups=False to initialize_model_parallel.'
        )


def _check_loaded(iteration: int, expected: int | None) -> None:
    if expected not in (None, iteration):
        raise ConfigurationError(
            f'load_checkpoint loaded iteration {iteration}, but job.set_up was given '
            f'checkpoint_iteration={expected}, which decides whether windows are newer; give the '
            'iteration of the loaded checkpoint.'
        )


def _check_built(built: Any) -> None:
    chunks = built[0] if isinstance(built, tuple) and len(built) == 3 else None
    if not isinstance(chunks, list) or not all(
        isinstance(chunk, DistributedDataParallel) for chunk in chunks
    ):
        raise ConfigurationError(
            'build() must return a list of model chunks, each in '
            'megatron.core.distributed.DistributedDataParallel, the optimizer and the scheduler.'
        )
    model, _, scheduler = built
    if not isinstance(scheduler, OptimizerParamScheduler):
        raise ConfigurationError(
            f'build() returned a {type(scheduler).__name__} as scheduler; sparse checkpointing '
            'restores megatron.core.optimizer_param_scheduler.OptimizerParamScheduler.'
        )
    if get_model_config(model[0]).finalize_model_grads_func is None:
        raise ConfigurationError(
            'The model configuration has no finalize_model_grads_func; set it to '
            'megatron.core.distributed.finalize_model_grads.'
        )
