# SPDX-License-Identifier: Apache-2.0
"""The description that a job reports."""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.moevement.job.reports import describe
from megatron.moevement.job.session import Session
from megatron.moevement.job.upstream_trainer import UpstreamTrainer
from moevement_ext.events import LossLogged
from tests.unit.megatron.moevement.job.test_identity import parsed
from tests.unit.megatron.moevement.seams.test_post_step import FACTS


def test_description_has_model_and_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, 'argv', ['pretrain_gpt.py', '--num-layers', '2'])
    flags = '--num-layers 2 --hidden-size 64 --num-experts 8 --pipeline-model-parallel-size 2'
    settings = vars(parsed(*flags.split()))
    found = describe(settings, FACTS, SimpleNamespace(train_iters=None))  # type: ignore[arg-type]
    assert found.model == '2 layers, hidden size 64, 8 experts, top 2'
    assert found.layout == {'ranks': 4, 'tensor': 1, 'pipeline': 2, 'context': 1, 'expert': 1}
    assert found.versions['megatron-core'] and found.train_iterations is None
    assert found.command == ['pretrain_gpt.py', '--num-layers', '2']


@pytest.mark.parametrize(
    ('loss', 'skipped', 'finite'),
    [(4.25, 0, 1), (math.nan, 0, 0), (math.inf, 0, 0), (math.nan, 1, None), (None, 0, None)],
)
def test_loss_is_reported_once_logged(loss: float | None, skipped: int, finite: int | None) -> None:
    """At the end of a log interval; a diverged loss is no missing loss."""
    emitted: list[LossLogged] = []
    facts = replace(FACTS, rank=3, log_interval=2)
    around: Any = SimpleNamespace(post_step=None)
    rank = SimpleNamespace(events=SimpleNamespace(emit=emitted.append))
    job: Any = SimpleNamespace(rank=rank, protection=None)
    session = Session(job, facts, SimpleNamespace(), around)  # type: ignore[arg-type]
    trainer = UpstreamTrainer({}, facts, SimpleNamespace(), session, None)  # type: ignore[arg-type]
    losses = {} if loss is None else {'lm loss': torch.tensor([loss])}
    for iteration in range(1, 4):
        trainer._training_log(
            lambda **call: emitted.clear(),
            total_loss_dict={},
            iteration=iteration,
            loss_dict=losses,
            skipped_iter=skipped,
        )
        assert len(emitted) == (finite is not None and iteration == 2)
        assert all(event.finite == finite for event in emitted)
