# SPDX-License-Identifier: Apache-2.0
"""Connects a session to upstream's trainer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import megatron.training.training as training
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron.moevement.facts import (
    Built,
    Chunks,
    Counters,
    JobFacts,
    MegatronOptimizer,
    OptimizerParamScheduler,
    Settings,
)
from megatron.moevement.job.named_files import empty_part, missing_data
from megatron.moevement.job.session import Session
from megatron.moevement.seams import dense_tier, patches, post_step, upstream
from megatron.moevement.seams.data_position import UpstreamData
from megatron.moevement.seams.post_step import Actions
from megatron.moevement.state.dense_random import DenseRandom
from moevement_ext import faults
from moevement_ext.events import DenseSaveFailed
from moevement_ext.faults import Phase
from moevement_ext.job.modes import LOOP_ENDS
from moevement_ext.logger import logger_of

logger = logger_of(__name__)

Forward = Callable[..., tuple[object, object]]
"""Upstream's forward step of a micro-batch: returns the output and a function for its loss."""

# Upstream's counts of the iterations since the last printed line.
_COUNTS = ('advanced iterations', 'skipped iterations')
_LOSS = 'lm loss'
_TRAINER = 'megatron.training.training'


class _StepResult(NamedTuple):
    """Result of upstream's `train_step`; the defaults are its own values for an exit."""

    loss_dict: Mapping[str, object] = {}
    skipped_iter: int = 1
    should_checkpoint: bool = False
    should_exit: bool = True
    exit_code: int = 0
    grad_norm: None = None
    num_zeros_in_grad: None = None
    max_attention_logit: int = 0


@dataclass(eq=False)
class UpstreamTrainer:
    """Wraps the functions that upstream's `pretrain` calls. Training thread only."""

    _settings: Settings
    _facts: JobFacts
    _counters: Counters
    _session: Session
    _data: UpstreamData

    def __post_init__(self) -> None:
        self._post_step = self._session.around.post_step
        self._logged_losses: dict[str, object] = {}
        self._before_log: dict[str, object] = {}
        self._job_has_logged = False
        self._entered = False
        self._may_fail = False
        self._not_saved: CheckpointException | None = None

    def install(self) -> None:
        """Wrap upstream's functions, once, before `pretrain`."""
        self._data.install()
        job = self._session.job
        if job.membership is not None:
            self._post_step.install(job.membership)
        if job.joining:
            self._session.alone.enter_context(upstream.setting('fake_process_group', True))
        patches.wrap(f'{_TRAINER}:setup_model_and_optimizer', self._set_up)
        random_numbers = DenseRandom(self._facts, self._settings, job.rank.identity.topology)
        patches.wrap(f'{_TRAINER}:load_checkpoint', random_numbers.load)
        patches.wrap(f'{_TRAINER}:save_checkpoint', random_numbers.save)
        patches.wrap(f'{_TRAINER}:save_checkpoint', self._save)
        patches.wrap(f'{_TRAINER}:build_train_valid_test_data_iterators', self._open_data)
        patches.wrap(f'{_TRAINER}:train', self._train, by_name=True)
        patches.wrap(f'{_TRAINER}:train_step', self._train_step, by_name=True)
        patches.wrap(f'{_TRAINER}:training_log', self._training_log, by_name=True)
        patches.wrap(f'{_TRAINER}:checkpoint_and_decide_exit', self._decide_exit, by_name=True)

    def _set_up(self, original: Callable[..., Built], *args: object, **kwargs: object) -> Built:
        """Build model and optimizer; load the dense checkpoint if it is the best source."""
        load = self._facts.load
        self._job_has_logged = self._session.job.joining

        def build(load_dense: bool) -> Built:
            with upstream.setting('load', load if load_dense else None):
                return original(*args, **kwargs)

        def load_dense(
            model: Chunks, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler
        ) -> None:
            if load is not None:
                context = kwargs.get('checkpointing_context')
                upstream.load_dense_checkpoint(self._counters, model, optimizer, scheduler, context)

        job = self._session.job
        # Of a joining process the survivors have chosen the source already.
        exchange = job.rank.exchange
        newest = -1 if job.joining else dense_tier.dense_iteration(self._facts, exchange)
        return self._session.set_up(build, load_dense, newest)

    def _open_data(self, original: Callable[..., object], provider: object) -> object:
        if empty := empty_part(self._settings):
            raise empty
        try:
            return original(provider)
        except Exception as error:
            missing = missing_data(self._settings, self._facts.rank)
            if missing is None:
                raise
            raise missing from error

    def _train(self, original: Callable[..., object], **call: Any) -> object:
        """Run upstream's loop, again after failures of other ranks."""
        if faults.armed():
            call['forward_step_func'] = _armed(call['forward_step_func'])
        self._data.use(call['train_data_iterator'], call['valid_data_iterator'])
        if self._session.job.restarted:  # upstream's loaders are at the start position
            self._data.move_training(upstream.consumed_of_the_phase())
            self._data.move_validation(self._counters.consumed_valid_samples)

        def save(iteration: int, not_kept: bool) -> None:
            training.save_checkpoint_and_time(
                iteration=iteration,
                num_floating_point_operations_so_far=(
                    self._counters.num_floating_point_operations_so_far
                ),
                non_persistent_ckpt=not_kept,
                **patches.shared(call, f'{_TRAINER}:save_checkpoint_and_time'),
            )

        forget = partial(post_step.forget_interrupted_save, call['checkpointing_context'])
        self._post_step.actions = Actions(post_step.evaluation(call), save, forget)
        return self._session.train(partial(self._enter, partial(original, **call)))

    def _enter(self, loop: Callable[[], object]) -> object:
        """Enter upstream's loop; all ranks must agree whether its first log line is due.

        A failure may have interrupted some ranks before that line, and a replacement has not
        logged.
        """
        self._job_has_logged |= self._entered
        self._entered = True
        return loop()

    def _train_step(
        self, original: Callable[..., object], iteration: int, **call: object
    ) -> object:
        def train_step(iteration: int, **schedule: object) -> object:
            return original(iteration=iteration, **(call | schedule))

        result = self._session.step(train_step, iteration)
        if result is LOOP_ENDS:
            training.print_datetime(f'exiting program at iteration {iteration}')
            return _StepResult()
        return result

    def _decide_exit(self, original: Callable[..., bool], **call: Any) -> bool:
        """Run upstream's saves and exits, except exits that an earlier launch has made."""
        made = self._post_step.exit_was_made(call['iteration'])
        interval = None if made else self._facts.exit_interval
        job = self._session.job
        ends = call['iteration'] >= self._counters.train_iters  # windows are freed after it
        self._may_fail = job.protection is not None and not (ends or job.rank.config.strict)
        self._not_saved = None
        try:
            with upstream.setting('exit_interval', interval):
                exits = original(**call)
        finally:
            self._may_fail = False
        error, self._not_saved = self._not_saved, None
        if error is not None and exits:
            raise error
        if error is not None and self._facts.rank == 0:  # only this rank knows the reasons
            self._log_not_saved(call['iteration'], error)
        return exits

    def _save(self, original: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Run upstream's save; keep the error of a failed write until it is known whether it ends.

        Upstream raises this error on all ranks, after they have agreed that a rank failed.
        """
        try:
            return original(*args, **kwargs)
        except CheckpointException as error:
            if not self._may_fail:
                raise
            self._not_saved = error
            return None

    def _log_not_saved(self, iteration: int, error: CheckpointException) -> None:
        reason = '; '.join(f'rank {rank}: {why[0]}' for rank, why in error.failures.items())
        self._session.job.rank.events.emit(DenseSaveFailed(iteration=iteration, reason=reason))
        logger.warning(
            'the dense checkpoint of iteration %d is not written: %s. Training goes on, as windows '
            'protect it, and the next interval tries again. Make room in --save %s.',
            iteration,
            reason,
            self._facts.save,
        )

    def _training_log(
        self,
        original: Callable[..., object],
        total_loss_dict: dict[str, object],
        iteration: int,
        **call: Any,
    ) -> object:
        if total_loss_dict is not self._logged_losses:
            # Upstream's loop was entered again within a log interval: keep its sums.
            total_loss_dict.update(self._logged_losses)
            self._logged_losses = total_loss_dict
        if self._job_has_logged:
            # At a start, upstream logs the first iteration in an extra line and counts it again in
            # the next line; a loop that is entered again is not at a start.
            call['is_first_iteration'] = False
        self._job_has_logged = True
        self._keep(total_loss_dict)
        try:
            result = original(total_loss_dict=total_loss_dict, iteration=iteration, **call)
        except Exception:
            # Upstream may have added a part of the losses; or it has printed their line and begun
            # a new interval, and then waited for other ranks (`--timing-log-level`).
            if any(total_loss_dict.get(count) for count in _COUNTS):
                self._logged_losses, self._before_log = self._before_log, {}
            raise
        self._session.report(iteration)
        if not call['skipped_iter']:
            self._session.report_loss(iteration, call['loss_dict'].get(_LOSS))
        return result

    def _keep(self, totals: dict[str, object]) -> None:
        """Copy upstream's sums, some of which it updates in place; copies are allocated once."""
        for name, value in totals.items():
            if not torch.is_tensor(value):
                self._before_log[name] = value
                continue
            kept = self._before_log.get(name)
            if not torch.is_tensor(kept) or kept.shape != value.shape:
                kept = self._before_log[name] = torch.empty_like(value)
            kept.copy_(value)


def _armed(forward_step: Forward) -> Forward:
    """Add the fault points of forward and backward to `forward_step`, for fault injection."""

    def struck(*args: object, **kwargs: object) -> tuple[object, object]:
        output, loss = forward_step(*args, **kwargs)
        faults.point(Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATE_FORWARD)
        if torch.is_tensor(output) and output.requires_grad:
            output.register_hook(lambda gradient: faults.point(Phase.BACKWARD))
        return output, loss

    return struck
