# SPDX-License-Identifier: Apache-2.0
"""When windows are re-planned; `tests/unit/protect` tests how all ranks adopt the plan."""

from collections.abc import Sequence
from functools import partial

import pytest

from moevement_ext.config import POPULARITY
from moevement_ext.plan.popularity import shares_of
from moevement_ext.plan.replanning import PlanParameters, WindowLoad
from moevement_ext.plan.strategy.moevement import MoEvement

BALANCED = {f'layer1.expert{expert}': 25.0 for expert in range(4)}


def load(start: int, tokens: dict[str, float], iteration_s: float = 1.0) -> WindowLoad:
    return WindowLoad(start=start, tokens=tokens, iteration_s=iteration_s, copy_bytes_per_s=1e9)


of_default = partial(MoEvement, POPULARITY, 3, change=0.1, fraction=0.25)
fixed = of_default(None).next


@pytest.mark.parametrize(
    ('tokens', 'replanned'),
    [
        ([25, 25, 25, 25], False),
        ([27, 23, 25, 25], False),  # two experts changed by 8 %
        ([29, 25, 23, 23], True),  # one of four changed by more than 10 %
    ],
)
def test_large_popularity_changes_cause_a_new_plan(tokens: list[int], replanned: bool) -> None:
    present = PlanParameters(version=1, window=3, shares=shares_of([load(0, BALANCED)]))
    seen = load(6, dict(zip(BALANCED, tokens, strict=True)))
    chosen = fixed(present, [seen])
    assert (chosen is not None) is replanned
    if chosen is not None:
        assert chosen.version == 2 and chosen.window == 3
        assert chosen.origin > seen.start and (chosen.origin - seen.start) % present.window == 0
        assert chosen.shares == shares_of([seen])


def test_auto_window_changes_the_window_and_keeps_the_order() -> None:
    present = PlanParameters(version=1, window=2, shares=shares_of([load(0, BALANCED)]))
    asked = []

    def auto(plan: PlanParameters, loads: Sequence[WindowLoad]) -> int:
        asked.append((plan, loads))
        return 5

    loads = [load(4, BALANCED)]
    chosen = of_default(auto).next(present, loads)
    assert asked == [(present, loads)]
    assert chosen == PlanParameters(version=2, origin=10, window=5, shares=present.shares)
