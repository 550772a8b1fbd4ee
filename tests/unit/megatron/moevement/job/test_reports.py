# SPDX-License-Identifier: Apache-2.0
"""The description that a job reports."""

import inspect
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import training

from megatron.moevement.job.reports import describe, logged_loss
from megatron.moevement.job.upstream_trainer import UpstreamTrainer
from moevement_ext.events import LossLogged
from tests.unit.megatron.moevement.job.test_identity import parsed
from tests.unit.megatron.moevement.seams.test_post_step import FACTS
from tests.unit.tools.samples import iteration_line


def test_description_has_model_and_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, 'argv', ['pretrain_gpt.py', '--num-layers', '2'])
    flags = '--num-layers 2 --hidden-size 64 --num-experts 8 --pipeline-model-parallel-size 2'
    settings = vars(parsed(*flags.split()))
    found = describe(settings, FACTS, SimpleNamespace(train_iters=None))  # type: ignore[arg-type]
    assert found.model == '2 layers, hidden size 64, 8 experts, top 2'
    assert found.layout == {'ranks': 4, 'tensor': 1, 'pipeline': 2, 'context': 1, 'expert': 1}
    assert found.versions['megatron-core'] and found.train_iterations is None
    assert found.command == ['pretrain_gpt.py', '--num-layers', '2']


def test_loss_is_read_from_the_line_that_upstream_logs() -> None:
    """Only after it was printed: an interrupted line has no loss."""
    emitted: list[Any] = []
    events = SimpleNamespace(emit=emitted.append)
    session: Any = SimpleNamespace(
        around=SimpleNamespace(post_step=None),
        job=SimpleNamespace(rank=SimpleNamespace(events=events)),
    )
    trainer = UpstreamTrainer(None, None, None, session, None)  # type: ignore[arg-type]
    printed: list[str] = []
    for line in (iteration_line(3, 1.0, loss=4.25), '-' * 40):
        trainer._note_loss(printed.append, line)
    assert emitted == [LossLogged(loss=4.25)] and len(printed) == 2


def without_loss(loss: float) -> str:
    """Upstream's line of a loss that is not at least 0; the real condition is in its source."""
    assert 'if avg >= 0.0:' in inspect.getsource(training.training_log)
    return iteration_line(3, 1.0, loss).replace(f'lm loss: {loss:.6E} | ', '')


@pytest.mark.parametrize(
    ('line', 'summed', 'finite'),
    [
        (iteration_line(3, 1.0, loss=math.inf), True, 0),
        (without_loss(math.nan), True, 0),
        (without_loss(math.nan), False, None),  # all iterations so far were skipped
        ('', True, None),
        (' validation loss at iteration 4 | lm loss value: 3.0E+00 |', True, None),
        (iteration_line(3, 1.0, loss=4.25), True, 1),
    ],
)
def test_diverged_loss_is_no_missing_loss(line: str, summed: bool, finite: int | None) -> None:
    loss = logged_loss(line, {'lm loss'} if summed else set())
    assert finite == (None if loss is None else LossLogged(loss=loss).finite)
