# SPDX-License-Identifier: Apache-2.0
"""Log lines of upstream's loop when it is entered again after a failure."""

import ast
import inspect
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.training import training
from torch.distributed.checkpoint.api import CheckpointException

from megatron.moevement.job.upstream_trainer import UpstreamTrainer, _StepResult
from megatron.moevement.seams import patches, upstream
from megatron.moevement.seams.data_position import UpstreamData
from megatron.moevement.seams.post_step import PostStep
from tests.unit.megatron.moevement.seams.test_post_step import FACTS

TRAINER = 'megatron.training.training'


class Rank:
    """Upstream's loop on one rank, interrupted by a failure in its first iteration.

    Attributes:
        first: value of `is_first_iteration` for each logged line.
    """

    def __init__(self, joining: bool, logs_before_the_failure: bool) -> None:
        self.first: list[bool] = []
        self._logs = [True] if joining else [logs_before_the_failure, True]
        counters = Namespace(consumed_valid_samples=0)
        session: Any = SimpleNamespace(
            around=SimpleNamespace(post_step=PostStep(FACTS, counters)),
            job=SimpleNamespace(
                joining=joining, restarted=False, rank=SimpleNamespace(exchange=None)
            ),
            set_up=lambda build, load_dense, dense_iteration: None,
            train=lambda enter: [enter() for _ in tuple(self._logs)],
            report=lambda iteration: None,
        )
        data = UpstreamData(cyclic=False, full_validation=False)
        self._trainer = UpstreamTrainer({}, FACTS, counters, session, data)
        self._trainer._set_up(lambda: None)
        self._trainer._train(self._loop, **dict.fromkeys(patches.UPSTREAM[f'{TRAINER}:train']))

    def _loop(self, **call: Any) -> None:
        if self._logs.pop(0):
            self._trainer._training_log(
                self._log,
                loss_dict={},
                total_loss_dict={},
                iteration=1,
                skipped_iter=1,
                is_first_iteration=True,
            )

    def _log(self, is_first_iteration: bool, **call: Any) -> None:
        self.first.append(is_first_iteration)


@pytest.mark.parametrize('joining', [False, True], ids=['survivor', 'new'])
@pytest.mark.parametrize('logged', [False, True])
def test_ranks_agree_on_the_first_logged_line(joining: bool, logged: bool) -> None:
    """Upstream enters a barrier before that line, which the other ranks would not enter."""
    rank = Rank(joining, logged)
    assert rank.first[-1] is False
    assert rank.first[:-1] == [True] * (logged and not joining), 'a start logs it'


def test_result_of_a_step_has_the_names_that_upstream_unpacks() -> None:
    tree = ast.parse(inspect.getsource(training.train))
    names = [
        tuple(ast.unparse(one) for one in node.targets[0].elts)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith('train_step(')
        if isinstance(node.targets[0], ast.Tuple)
    ]
    assert names == [_StepResult._fields]


LANGUAGE, EXPERTS, COUNT = 'lm loss', 'load_balancing_loss', 'advanced iterations'


def add(losses: dict[str, float], totals: dict[str, Any]) -> None:
    """Like upstream's `training_log`: sums of experts are added in place, after all reductions."""
    totals[COUNT] = totals.get(COUNT, 0) + 1
    totals[LANGUAGE] = totals.get(LANGUAGE, torch.tensor([0.0])) + losses[LANGUAGE]
    if EXPERTS in totals:
        totals[EXPERTS] += losses[EXPERTS]
    else:
        totals[EXPERTS] = torch.tensor(losses[EXPERTS])


def cut_off(loss_dict: dict[str, float], total_loss_dict: dict[str, Any], **more: Any) -> None:
    add(loss_dict, total_loss_dict)
    raise ConnectionError('another rank is gone')


def whole(loss_dict: dict[str, float], total_loss_dict: dict[str, Any], **more: Any) -> None:
    add(loss_dict, total_loss_dict)


def printed_then_cut_off(
    loss_dict: dict[str, float], total_loss_dict: dict[str, Any], **more: Any
) -> None:
    """Like upstream with `--timing-log-level 1`: it prints, and waits for all ranks' timers."""
    add(loss_dict, total_loss_dict)
    total_loss_dict |= {LANGUAGE: torch.tensor([0.0]), COUNT: 0}
    raise ConnectionError('another rank is gone')


@pytest.fixture
def trainer() -> UpstreamTrainer:
    around = SimpleNamespace(post_step=None)
    session: Any = SimpleNamespace(
        around=around, report=lambda iteration: None, report_loss=lambda iteration, loss: None
    )
    counters = Namespace(consumed_valid_samples=0, train_iters=9)
    found = UpstreamTrainer(None, None, counters, session, None)  # type: ignore[arg-type]
    found._job_has_logged = True
    return found


@pytest.mark.parametrize(
    ('iteration', 'strict', 'exits', 'goes_on'),
    [(4, False, False, True), (4, True, False, False), (4, False, True, False)]
    + [(9, False, False, False)],
    ids=['protected', 'strict', 'exits there', 'last'],
)
def test_failed_save_ends_what_no_window_protects_afterwards(
    trainer: UpstreamTrainer,
    monkeypatch: pytest.MonkeyPatch,
    iteration: int,
    strict: bool,
    exits: bool,
    goes_on: bool,
) -> None:
    monkeypatch.setattr(upstream, 'setting', lambda *setting: nullcontext())

    def failing(*args: object) -> None:
        raise CheckpointException('write', {})

    def decide(iteration: int) -> bool:
        trainer._save(failing)
        return exits

    rank = SimpleNamespace(config=SimpleNamespace(strict=strict))
    trainer._session.job = SimpleNamespace(protection=object(), rank=rank)  # type: ignore[assignment]
    trainer._post_step = PostStep(FACTS, trainer._counters)
    trainer._facts = replace(FACTS, rank=1)
    with nullcontext() if goes_on else pytest.raises(CheckpointException):
        assert trainer._decide_exit(decide, iteration=iteration) is exits


def log(trainer: UpstreamTrainer, original: Any, losses: Any, totals: Any, iteration: int) -> None:
    trainer._training_log(
        original, loss_dict=losses, total_loss_dict=totals, iteration=iteration, skipped_iter=0
    )


def test_printed_sums_are_not_counted_again(trainer: UpstreamTrainer) -> None:
    totals: dict[str, Any] = {}
    losses = {LANGUAGE: 4.0, EXPERTS: 2.0}
    log(trainer, whole, losses, totals, 1)
    with pytest.raises(ConnectionError):
        log(trainer, printed_then_cut_off, losses, totals, 2)
    totals = {}  # the loop is entered again
    log(trainer, whole, losses, totals, 3)
    assert (totals[COUNT], totals[LANGUAGE].item()) == (1, 4.0)


def test_sums_are_rolled_back_to_before_the_interrupted_line(trainer: UpstreamTrainer) -> None:
    totals: dict[str, Any] = {}
    losses = {LANGUAGE: 4.0, EXPERTS: 2.0}
    log(trainer, whole, losses, totals, 1)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            log(trainer, cut_off, losses, totals, 2)
        totals = {}  # the loop is entered again
    log(trainer, whole, losses, totals, 3)
    assert (totals[COUNT], totals[LANGUAGE].item(), totals[EXPERTS].item()) == (2, 8.0, 4.0)
