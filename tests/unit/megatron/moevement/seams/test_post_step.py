# SPDX-License-Identifier: Apache-2.0
"""After a failure, all ranks run the post-step actions that any rank had left undone."""

import dataclasses
import itertools
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import training

from megatron.moevement.facts import JobFacts
from megatron.moevement.seams import patches
from megatron.moevement.seams.post_step import (
    Actions,
    PostStep,
    PostStepProgress,
    forget_interrupted_save,
)
from moevement_ext.membership.rendezvous import RoundEnded
from tests.support.each import each

ITERATION = 6
OTHER = 4
"""An interval that does not divide `ITERATION`."""
BEFORE = 40
"""Validation samples consumed before that iteration."""
EVALUATED = 16
"""Samples of one evaluation."""

FACTS = JobFacts(
    rank=0,
    world_size=4,
    data_parallel_size=2,
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=2,
    context_parallel_size=1,
    sequence_parallel=False,
    distributed_backend='gloo',
    timeout=timedelta(minutes=1),
    use_distributed_optimizer=True,
    micro_batch_size=1,
    global_batch_size=8,
    seq_length=16,
    hidden_size=8,
    params_dtype=torch.float32,
    fp32_residual_connection=False,
    log_interval=1,
    save='checkpoints',
)
ALL_DUE = dataclasses.replace(FACTS, eval_interval=3, save_interval=2)


class Position:
    """Data position; only validation data may be moved."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls

    def move_training(self, consumed_samples: int) -> None:
        raise AssertionError('training data are moved elsewhere')

    def move_validation(self, consumed_samples: int) -> None:
        self._calls.append(('validation', consumed_samples))


class Rank:
    """One rank, and the actions that it repeats."""

    def __init__(self, facts: JobFacts, consumed: int = BEFORE, do_valid: int = 1) -> None:
        self.counters = Namespace(consumed_valid_samples=consumed, do_valid=do_valid)
        self.post_step = PostStep(facts, self.counters)
        self.calls: list[tuple[Any, ...]] = []
        self.post_step.actions = Actions(
            evaluate=lambda iteration: self.calls.append(('evaluate', iteration)),
            save=lambda iteration, not_kept: self.calls.append(('save', iteration, not_kept)),
            forget=lambda: None,
        )

    def commit(self, iteration: int = ITERATION) -> PostStepProgress:
        """Begin an iteration; none of its post-step actions is done."""
        self.post_step.begin(iteration)
        return self.post_step.progress()

    def evaluate(self) -> PostStepProgress:
        """Evaluate to the end, as upstream does."""
        self.post_step._evaluating(self._evaluation)
        return self.post_step.progress()

    def save(self) -> PostStepProgress:
        """Save to the end, as upstream does."""
        self.post_step._saving(lambda: None)
        return self.post_step.progress()

    def _evaluation(self) -> None:
        self.counters.consumed_valid_samples += EVALUATED

    def catch_up(self, survivors: Sequence[PostStepProgress], grows: bool = False) -> None:
        """Catch up after a failure that followed `ITERATION`."""
        self.post_step.catch_up(ITERATION, survivors, Position(self.calls), grows)


def survivor(facts: JobFacts, evaluated: bool, saved: bool) -> PostStepProgress:
    """Progress of a rank at the time of the failure."""
    rank = Rank(facts)
    progress = rank.commit()
    if evaluated:
        progress = rank.evaluate()
    if saved:
        progress = rank.save()
    return progress


NOTHING, EVALUATION, BOTH = (
    survivor(ALL_DUE, evaluated=False, saved=False),
    survivor(ALL_DUE, evaluated=True, saved=False),
    survivor(ALL_DUE, evaluated=True, saved=True),
)
EVALUATE = [('validation', BEFORE), ('evaluate', ITERATION)]
EVALUATED_BY_ALL = [('validation', BEFORE + EVALUATED)]
SAVE = [('save', ITERATION, False)]


@pytest.mark.parametrize(
    ('survivors', 'expected'),
    [
        ([NOTHING, NOTHING], EVALUATE + SAVE),
        ([NOTHING, EVALUATION], EVALUATE + SAVE),
        ([EVALUATION, NOTHING], EVALUATE + SAVE),
        ([NOTHING, BOTH], EVALUATE + SAVE),
        ([EVALUATION, EVALUATION], EVALUATED_BY_ALL + SAVE),
        ([EVALUATION, BOTH], EVALUATED_BY_ALL + SAVE),
        ([BOTH, EVALUATION], EVALUATED_BY_ALL + SAVE),
        ([BOTH, BOTH], EVALUATED_BY_ALL),
    ],
)
def test_all_ranks_repeat_actions_that_any_rank_left_undone(
    survivors: list[PostStepProgress], expected: list[tuple[Any, ...]]
) -> None:
    """A new process, which has no progress, does the same."""
    survived, new = Rank(ALL_DUE), Rank(ALL_DUE, consumed=0)
    survived.commit()
    for rank in (survived, new):
        rank.catch_up(survivors)
        assert rank.calls == expected
        assert rank.counters.consumed_valid_samples == expected[0][1]


def test_repeated_actions_count_as_done() -> None:
    """The next failure may precede the commit of the next iteration."""
    rank = Rank(ALL_DUE)
    rank.commit()
    rank.catch_up([NOTHING])
    progress = rank.post_step.progress()
    assert progress.evaluated and progress.saved
    rank.calls.clear()
    rank.catch_up([progress, progress])
    assert [what for what, *_ in rank.calls] == ['validation']


def test_second_failure_keeps_evaluation_progress_of_the_first() -> None:
    """Recovery from the first failure has moved all ranks back to before the evaluation."""
    ranks = [Rank(ALL_DUE), Rank(ALL_DUE)]
    for rank in ranks:
        rank.commit()
        rank.evaluate()
        rank.counters.consumed_valid_samples = BEFORE
    survivors = [rank.post_step.progress() for rank in ranks]
    for rank in ranks:
        rank.calls.clear()
        rank.catch_up(survivors)
        assert rank.calls == EVALUATED_BY_ALL + SAVE
        rank.commit(ITERATION + 1)
        assert rank.post_step.progress().valid_now == BEFORE + EVALUATED


def test_tracker_file_counts_if_it_names_the_iteration_during_the_save(tmp_path: Path) -> None:
    """A failure may follow the tracker file and precede the end of the save."""
    tracker = tmp_path / 'latest_checkpointed_iteration.txt'
    facts = dataclasses.replace(ALL_DUE, save=str(tmp_path))
    complete, repeating, other = Rank(facts), Rank(facts), Rank(facts)
    tracker.write_text('4')
    assert not complete.commit().saved
    # A rank that had not seen the file made all ranks write into the checkpoint that it names.
    repeating.post_step.take_over([repeating.commit()])
    tracker.write_text(f'{ITERATION}')
    assert complete.post_step.progress().saved
    assert not repeating.post_step.progress().saved
    assert not other.commit().saved, 'it is of another run'


@pytest.mark.parametrize(
    ('survivors', 'expected'),
    [([BOTH, EVALUATION], EVALUATED_BY_ALL + SAVE), ([BOTH, NOTHING], EVALUATE + SAVE)],
)
def test_new_process_keeps_the_progress_of_lost_survivors(
    survivors: list[PostStepProgress], expected: list[tuple[Any, ...]]
) -> None:
    """The state that it has loaded may be several evaluations old."""
    new = Rank(ALL_DUE, consumed=0)
    new.post_step.take_over(survivors)
    new.counters.consumed_valid_samples = BEFORE - 2 * EVALUATED
    new.catch_up([new.post_step.progress()])
    assert new.calls == expected


@each('interval, start', list(itertools.product([None, 3, OTHER], [None, 6, 7])))
@each('do_valid', [0, 1])
def test_evaluations_are_due_as_upstream_schedules_them(
    interval: int | None, start: int | None, do_valid: int
) -> None:
    facts = dataclasses.replace(FACTS, eval_interval=interval, start_eval_at_iter=start)
    rank = Rank(facts, do_valid=do_valid)
    rank.catch_up([rank.commit()])
    due = interval == 3 and start != 7 and do_valid
    assert rank.calls == (EVALUATE if due else EVALUATE[:1])


@pytest.mark.parametrize('ended', [False, True])
def test_steps_whose_waits_were_ended_do_not_count(
    ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's waits return then: upstream prints any loss, and names a checkpoint that has holes."""
    rank, wrapped = Rank(ALL_DUE), {}
    monkeypatch.setattr(patches, 'wrap', wrapped.__setitem__)
    monkeypatch.setattr(torch.distributed, 'barrier', lambda group=None: None)
    rank.post_step.install(SimpleNamespace(synchronize=lambda: None, waits_returned=ended))
    rank.commit()
    evaluate, print_results, save, report = wrapped.values()
    called: list[str] = []

    def evaluation() -> None:
        evaluate(lambda: None)
        called.append('loss is printed')

    def saving() -> None:
        torch.distributed.barrier()
        called.append('checkpoint is named')

    for wrapper, step in ((print_results, evaluation), (save, saving)):
        with pytest.raises(RoundEnded) if ended else nullcontext():
            wrapper(step)
    done = rank.post_step.progress()
    assert (done.evaluated, done.saved, len(called)) == (not ended, not ended, 0 if ended else 2)
    with pytest.raises(RoundEnded) if ended else nullcontext():
        report(lambda: None)


INTERVALS = [None, 2, OTHER]


def upstreams_saves(facts: JobFacts, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], bool]:
    """Checkpoints that upstream saves after `ITERATION`, and whether it exits."""
    saves: list[tuple[Any, ...]] = []

    def save(iteration: int, *_: object, non_persistent_ckpt: bool = False, **__: object) -> None:
        saves.append(('save', iteration, non_persistent_ckpt))

    args = Namespace(
        **dataclasses.asdict(facts),
        exit_signal_handler=False,
        exit_duration_in_mins=None,
        phase_transition_iterations=None,
    )
    monkeypatch.setattr(training, 'get_args', lambda: args)
    monkeypatch.setattr(training, 'get_timers', lambda: None)
    monkeypatch.setattr(training, 'print_datetime', lambda line: None)
    monkeypatch.setattr(training, 'save_checkpoint_and_time', save)
    exits = training.checkpoint_and_decide_exit(None, None, None, ITERATION, 0.0, {}, None)
    return saves, exits


@each('save', [None, 'checkpoints'])
@each('interval, not_kept, ends', list(itertools.product(INTERVALS, INTERVALS, INTERVALS)))
def test_interrupted_save_is_repeated_as_upstream_saves_it(
    save: str | None,
    interval: int | None,
    not_kept: int | None,
    ends: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = dataclasses.replace(
        FACTS,
        save=save,
        save_interval=interval,
        non_persistent_save_interval=not_kept,
        exit_interval=ends,
    )
    expected, exits = upstreams_saves(facts, monkeypatch)
    rank = Rank(facts)
    rank.catch_up([rank.commit()])
    assert rank.calls[1:] == expected
    assert rank.post_step.exits(ITERATION) is exits


@each(
    'dense, kept',
    [
        ({'save': None}, False),
        ({}, True),
        ({'non_persistent_save_interval': 3}, False),
        ({'save_interval': 3, 'non_persistent_save_interval': 3}, True),
    ],
)
@each('passed, ends', [(-1, True), (5, True), (6, False), (7, False)])
def test_exit_of_an_earlier_launch_is_not_repeated(
    dense: dict[str, Any], kept: bool, passed: int, ends: bool
) -> None:
    """Unless a dense checkpoint was due then that was not written."""
    facts = dataclasses.replace(FACTS, **dense, exit_interval=2)
    survived, new = Rank(facts), Rank(facts)
    survived.post_step.pass_exits(passed)
    new.catch_up([survived.commit()])
    for rank in (survived, new):
        assert rank.post_step.exits(ITERATION) is (ends or kept)
        assert rank.post_step.exits(8)


@each('due', [{}, {'save_interval': 2}, {'non_persistent_save_interval': 2}, {'exit_interval': 2}])
@each('done', [False, True])
def test_checkpoint_before_a_larger_batch_is_saved(due: dict[str, int], done: bool) -> None:
    """Upstream saves on entry of the next iteration, which no survivor may have reached."""
    for save, expected in ((FACTS.save, SAVE), (None, [])):
        facts = dataclasses.replace(FACTS, save=save, **due)
        rank = Rank(facts)
        rank.commit()
        rank.catch_up([survivor(facts, evaluated=False, saved=done)] * 2, grows=True)
        assert rank.calls[1:] == expected


def test_losses_of_further_tokens_that_were_not_reported_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the report of the next iteration adds them to its own."""
    monkeypatch.setattr(MTPLossLoggingHelper, 'tracker', {'loss_values': torch.tensor([3.0])})
    forget_interrupted_save(None)
    assert MTPLossLoggingHelper.tracker['loss_values'].tolist() == [0.0]
