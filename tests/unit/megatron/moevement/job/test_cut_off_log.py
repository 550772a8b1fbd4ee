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
    session: Any = SimpleNamespace(around=around, report=lambda iteration: None)
    found = UpstreamTrainer(None, None, None, session, None)  # type: ignore[arg-type]
    found._job_has_logged = True
    return found


def log(trainer: UpstreamTrainer, original: Any, losses: Any, totals: Any, iteration: int) -> None:
    trainer._training_log(original, loss_dict=losses, total_loss_dict=totals, iteration=iteration)


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
