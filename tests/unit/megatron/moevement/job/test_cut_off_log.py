# SPDX-License-Identifier: Apache-2.0
"""A log line that a failure interrupts leaves no sums for the next lines."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.moevement.seams import cpu_device

cpu_device.install()

from megatron.moevement.job.upstream_trainer import UpstreamTrainer  # noqa: E402

LANGUAGE, EXPERTS, COUNT = 'lm loss', 'load_balancing_loss', 'advanced iterations'


def add(losses: dict[str, float], totals: dict[str, Any]) -> None:
    """Like upstream's `training_log`: sums of experts are added in place, after all reductions."""
    totals[COUNT] = totals.get(COUNT, 0) + 1
    totals[LANGUAGE] = totals.get(LANGUAGE, torch.tensor([0.0])) + losses[LANGUAGE]
    if EXPERTS in totals:
        totals[EXPERTS] += losses[EXPERTS]
    else:
        totals[EXPERTS] = torch.tensor(losses[EXPERTS])


def cut_off(losses: dict[str, float], totals: dict[str, Any], *others: Any, **more: Any) -> None:
    add(losses, totals)
    raise ConnectionError('another rank is gone')


def whole(losses: dict[str, float], totals: dict[str, Any], *others: Any, **more: Any) -> None:
    add(losses, totals)


def printed_then_cut_off(losses: dict[str, float], totals: dict[str, Any], *others: Any) -> None:
    """Like upstream with `--timing-log-level 1`: it prints, and waits for all ranks' timers."""
    add(losses, totals)
    totals[LANGUAGE], totals[COUNT] = torch.tensor([0.0]), 0
    raise ConnectionError('another rank is gone')


@pytest.fixture
def trainer() -> UpstreamTrainer:
    around = SimpleNamespace(post_step=None)
    session: Any = SimpleNamespace(around=around, report=lambda iteration: None)
    found = UpstreamTrainer(None, None, None, session, None)  # type: ignore[arg-type]
    found._job_has_logged = True
    return found


def test_printed_sums_are_not_counted_again(trainer: UpstreamTrainer) -> None:
    totals: dict[str, Any] = {}
    losses = {LANGUAGE: 4.0, EXPERTS: 2.0}
    trainer._training_log(whole, losses, totals, 0.1, 1)
    with pytest.raises(ConnectionError):
        trainer._training_log(
            lambda *given, **more: printed_then_cut_off(*given), losses, totals, 0.1, 2
        )
    totals = {}  # the loop is entered again
    trainer._training_log(whole, losses, totals, 0.1, 3)
    assert (totals[COUNT], totals[LANGUAGE].item()) == (1, 4.0)


def test_sums_are_rolled_back_to_before_the_interrupted_line(trainer: UpstreamTrainer) -> None:
    totals: dict[str, Any] = {}
    losses = {LANGUAGE: 4.0, EXPERTS: 2.0}
    trainer._training_log(whole, losses, totals, 0.1, 1)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            trainer._training_log(cut_off, losses, totals, 0.1, 2)
        totals = {}  # the loop is entered again
    trainer._training_log(whole, losses, totals, 0.1, 3)
    assert (totals[COUNT], totals[LANGUAGE].item(), totals[EXPERTS].item()) == (2, 8.0, 4.0)
