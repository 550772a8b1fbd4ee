# SPDX-License-Identifier: Apache-2.0
"""Repeats upstream's steps after an iteration, evaluation and dense checkpoint, if interrupted.

A failure may strike when only some ranks have finished these steps. All ranks then resume at the
entry of the next iteration, and together repeat each step that any rank has not finished.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import megatron.training.training as training
import msgspec

from megatron.moevement.facts import Chunks, Counters, JobFacts
from megatron.moevement.seams import patches, upstream
from megatron.moevement.seams.data_position import DataPosition
from moevement_ext import faults
from moevement_ext.faults import Phase
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rendezvous import RoundEnded

_EVALUATION = 'megatron.training.training:evaluate_and_print_results'


class PostStepProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a rank in the steps after an iteration."""

    valid_before: int
    """Validation samples consumed before the evaluation that may follow the iteration."""
    valid_now: int
    evaluated: bool
    """The evaluation is over, or not due."""
    saved: bool
    """The dense checkpoint is written, or not due."""
    exits_made: int
    """See `PostStep.pass_exits`."""


class Due(enum.Enum):
    """Whether a step after the newest iteration is still to be done."""

    OVER = 'over, or not due'
    YES = 'due'
    UNLESS_NAMED = 'due, unless the tracker file names the iteration'


class Actions(NamedTuple):
    """Functions that repeat upstream's steps after an iteration."""

    evaluate: Callable[[int], None]
    """Called with the iteration."""
    save: Callable[[int, bool], None]
    """Called with the iteration, and whether the checkpoint is temporary."""
    forget: Callable[[], None]
    """Called before the loop is entered again."""


class PostStep:
    """Follows evaluation and dense checkpoint after the newest iteration. Training thread only."""

    def __init__(self, facts: JobFacts, counters: Counters) -> None:
        self._facts = facts
        self._counters = counters
        self._membership: Membership | None = None
        self.actions: Actions | None = None
        self._iteration = 0
        self._evaluation = self._checkpoint = Due.OVER
        self._valid_before = counters.consumed_valid_samples
        self._valid_reported = 0
        self._exits_made = -1

    def install(self, membership: Membership) -> None:
        """Wrap upstream's functions."""
        self._membership = membership
        patches.wrap('megatron.training.training:evaluate', self._trusting)
        patches.wrap(_EVALUATION, self._evaluating)
        patches.wrap('megatron.training.training:save_checkpoint_and_time', self._saving)
        patches.wrap('megatron.core.utils:StragglerDetector.report', self._trusting)

    def reset_loop_state(self) -> None:
        """Reset state before upstream's loop is entered again, wherever it was interrupted."""
        if self.actions is not None:
            self.actions.forget()

    def begin(self, iteration: int) -> None:
        """Note that iteration `iteration` is committed, and which later steps are due."""
        facts, self._iteration = self._facts, iteration
        self._valid_before = self._counters.consumed_valid_samples
        self._valid_reported = 0
        evaluates = (
            _due(facts.eval_interval, iteration)
            and self._counters.do_valid
            and (facts.start_eval_at_iter is None or iteration >= facts.start_eval_at_iter)
        )
        self._evaluation = Due.YES if evaluates else Due.OVER
        saves = facts.save and (
            _due(facts.save_interval, iteration)
            or _due(facts.non_persistent_save_interval, iteration)
            or self.exits(iteration)
        )
        self._checkpoint = Due.YES if saves else Due.OVER
        # Once the tracker file names this iteration, its checkpoint is complete; but if it does so
        # before the save, an earlier attempt or another run has written it.
        if saves and not self._not_kept(iteration):
            if upstream.saved_iteration(facts.save) != iteration:
                self._checkpoint = Due.UNLESS_NAMED

    def exits(self, iteration: int) -> bool:
        """True if an exit is due after `iteration`, before the last iteration."""
        due = _due(self._facts.exit_interval, iteration)
        return due and not self.exit_was_made(iteration)

    def exit_was_made(self, iteration: int) -> bool:
        """True if an earlier launch made the exit due after `iteration` and left only windows.

        If a dense checkpoint to keep is due, it is written before the exit; save and exit then
        always go together.
        """
        kept = self._facts.save and not self._not_kept(iteration)
        return iteration <= self._exits_made and not kept

    def pass_exits(self, iteration: int) -> None:
        """Skip exits up to `iteration`, which an earlier launch has reached.

        The windows of that launch are older than its exit, so every launch would exit there again.
        A launch that died right before its exit counts as well.
        """
        self._exits_made = iteration

    def take_over(self, survivors: Sequence[PostStepProgress]) -> None:
        """Adopt the progress of the survivors: all may be lost before this recovery ends."""
        evaluated = all(survivor.evaluated for survivor in survivors)
        saved = all(survivor.saved for survivor in survivors)
        self._evaluation = Due.OVER if evaluated else Due.YES
        # A repeated save writes into the checkpoint that the tracker file may name.
        self._checkpoint = Due.OVER if saved else Due.YES
        self._exits_made = max(survivor.exits_made for survivor in survivors)
        self._valid_before = max(survivor.valid_before for survivor in survivors)
        self._valid_reported = max(survivor.valid_now for survivor in survivors)

    def catch_up(
        self,
        iteration: int,
        survivors: Sequence[PostStepProgress],
        data: DataPosition,
        grows: bool,
    ) -> None:
        """Run the steps after `iteration` that some survivor has not finished. Collective.

        `grows`: the next iteration has more micro-batches; upstream saves before it.
        """
        self.take_over(survivors)
        if grows and self._facts.save:
            self._checkpoint = Due.YES
        evaluated = self._evaluation is Due.OVER
        self._counters.consumed_valid_samples = (
            self._valid_reported if evaluated else self._valid_before
        )
        self._valid_reported = 0
        data.move_validation(self._counters.consumed_valid_samples)
        if self.actions is not None:
            if not evaluated:
                self.actions.evaluate(iteration)
            if self._checkpoint is Due.YES:
                self.actions.save(iteration, self._not_kept(iteration) and not grows)
        self._evaluation = self._checkpoint = Due.OVER

    def _not_kept(self, iteration: int) -> bool:
        """True if the checkpoint due after `iteration` is temporary, by upstream's rule."""
        facts = self._facts
        return not _due(facts.save_interval, iteration) and _due(
            facts.non_persistent_save_interval, iteration
        )

    def progress(self) -> PostStepProgress:
        """Progress, for other ranks after a failure.

        A recovery moves the counter of validation samples back. If another failure interrupts the
        recovery, the samples that this rank had consumed before the first failure count.
        """
        self._valid_reported = max(self._valid_reported, self._counters.consumed_valid_samples)
        if self._checkpoint is Due.UNLESS_NAMED:
            if upstream.saved_iteration(self._facts.save) == self._iteration:
                self._checkpoint = Due.OVER
        return PostStepProgress(
            valid_before=self._valid_before,
            valid_now=self._valid_reported,
            evaluated=self._evaluation is Due.OVER,
            saved=self._checkpoint is Due.OVER,
            exits_made=self._exits_made,
        )

    def _evaluating(
        self, original: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        faults.point(Phase.EVALUATE)
        result = original(*args, **kwargs)
        faults.point(Phase.EVALUATED)
        self._evaluation = Due.OVER
        return result

    def _saving(self, original: Callable[..., object], *args: object, **kwargs: object) -> object:
        faults.point(Phase.SAVE)
        # Upstream names a checkpoint as the latest one after a barrier.
        with patches.wrapped('torch.distributed:barrier', self._trusting):
            result = original(*args, **kwargs)
        faults.point(Phase.SAVED)
        self._checkpoint = Due.OVER
        return result

    def _trusting(self, original: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call upstream. Raises `RoundEnded` if NCCL's waits may have returned undefined data."""
        result = original(*args, **kwargs)
        assert self._membership is not None
        self._membership.synchronize()
        if self._membership.waits_returned:
            raise RoundEnded('another rank was lost in a step after an iteration')
        return result


def _due(interval: int | None, iteration: int) -> bool:
    return iteration % interval == 0 if interval else False


def evaluation(call: Mapping[str, Any]) -> Callable[[int], None]:
    """Function that runs upstream's evaluation after an iteration, as its loop does.

    `call`: the arguments of that loop, by name.
    """
    model: Chunks = call['model']
    given = patches.shared(call, _EVALUATION)

    def evaluate(iteration: int) -> None:
        hooks = training.should_disable_forward_pre_hook(training.get_args())
        if hooks and model[0].remove_forward_pre_hook_handles:
            training.disable_forward_pre_hook(model, optimizer=call['optimizer'])
        else:
            hooks = False
        training.evaluate_and_print_results(
            prefix=f'iteration {iteration}',
            data_iterator=call['valid_data_iterator'],
            iteration=iteration,
            verbose=False,
            write_to_tensorboard=True,
            **given,
        )
        for chunk in model:  # upstream skips this once its time limit has passed, and exits
            chunk.train()
        if hooks:
            training.enable_forward_pre_hook(model)

    return evaluate


def forget_interrupted_save(checkpointing_context: dict[str, object] | None) -> None:
    """Drop remains of an interrupted report or save, and state that a new process lacks.

    Strategies of dense checkpoints keep the structure from one save to the next
    (`--ckpt-assume-constant-structure`); a new process asks the other ranks for it.
    """
    upstream.clear_metrics()
    upstream.switch_detector_as_launched()
    for remembered in ('save_strategy', 'load_strategy', 'local_checkpoint_cache'):
        (checkpointing_context or {}).pop(remembered, None)
