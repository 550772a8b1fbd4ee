# SPDX-License-Identifier: Apache-2.0
"""The loss of an iteration, read from the return value of a schedule."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules

from megatron.moevement.seams import patches
from megatron.moevement.seams.schedules import SCHEDULES, Losses

SCHEDULE = SCHEDULES[1]


def of_tokens(*pairs: tuple[float, float]) -> list[dict[str, torch.Tensor]]:
    """Losses that `loss_func` of upstream's trainer returns per micro-batch, and another key."""
    return [{'lm loss': torch.tensor(pair), 'other': torch.ones(2)} for pair in pairs]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Run a schedule that returns its argument, wrapped like upstream's."""
    followed = Losses()

    def of(reduced: Any, **kwargs: Any) -> float | None:
        wrapped = getattr(schedules, SCHEDULE)
        assert wrapped(reduced=reduced, **kwargs) is reduced
        return followed.newest

    def schedule(reduced: Any, forward_only: bool = False) -> Any:
        return reduced

    def wrap(part: str, wrapper: Callable[..., Any]) -> None:
        name = part.partition(':')[2]
        monkeypatch.setattr(schedules, name, lambda **kwargs: wrapper(schedule, **kwargs))

    monkeypatch.setattr(patches, 'wrap', wrap)
    followed.install()
    of.followed = followed  # type: ignore[attr-defined]
    yield of


def test_loss_is_the_mean_over_tokens_of_all_micro_batches(run: Callable[..., Any]) -> None:
    assert run(of_tokens((12.0, 4.0), (8.0, 1.0))) == 4.0
    assert run([{'loss': torch.tensor(1.5)}, {'loss': torch.tensor(2.5)}]) == 2.0
    lowest = torch.tensor(2.0).nextafter(torch.tensor(3.0))
    assert run([{'loss': lowest}]) == lowest.item() != 2.0


@pytest.mark.parametrize(
    'reduced', [[], None, [torch.ones(1)], [{}], of_tokens((1.0, 0.0))], ids=str
)
def test_loss_is_unknown_if_the_schedule_returns_none(
    run: Callable[..., Any], reduced: Any
) -> None:
    """On other stages, with another kind of loop, or if no token counts."""
    assert run(reduced) is None


def test_evaluation_and_previous_iteration_do_not_set_the_loss(run: Callable[..., Any]) -> None:
    assert run(of_tokens((3.0, 1.0))) == 3.0
    assert run(of_tokens((9.0, 1.0)), forward_only=True) == 3.0
    run.followed.begin()  # type: ignore[attr-defined]
    assert run(of_tokens((9.0, 1.0)), forward_only=True) is None


def test_loss_is_known_although_nothing_has_waited_for_the_device(run: Callable[..., Any]) -> None:
    """As with `--clip-grad 0`: no norm is read before the loss."""
    run(of_tokens((3.0, 1.0)))
    followed = run.followed  # type: ignore[attr-defined]

    class Copy:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            followed._host[0] = 5.0

    followed._arrived = Copy()
    assert followed.newest == 5.0
