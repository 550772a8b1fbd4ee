# SPDX-License-Identifier: Apache-2.0
"""Steps that upstream's loop runs only at a start are skipped by all ranks on re-entry."""

import ast
import inspect
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.moevement.seams import cpu_device

cpu_device.install()

from megatron.training import training  # noqa: E402

from megatron.moevement.job.upstream_trainer import UpstreamTrainer, _StepResult  # noqa: E402
from megatron.moevement.seams import patches  # noqa: E402
from megatron.moevement.seams.data_position import UpstreamData  # noqa: E402
from megatron.moevement.seams.post_step import PostStep  # noqa: E402
from tests.unit.megatron.moevement.seams.test_post_step import FACTS  # noqa: E402

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
                self._log, total_loss_dict={}, iteration=1, is_first_iteration=True
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
