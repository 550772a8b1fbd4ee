# SPDX-License-Identifier: Apache-2.0
"""When a rank counts as slow, and what is told of it."""

from collections.abc import Sequence

from moevement_ext.events import SlowRank
from moevement_ext.plan.replanning import WindowLoad
from moevement_ext.protect.slow_ranks import SlowRanks

WINDOW = 4
STAGES = (0, 0, 0, 1, 1, 2)


def observed(*speeds: tuple[int, Sequence[float]]) -> list[SlowRank]:
    """Events after so many windows with these seconds per iteration of each rank."""
    told: list[SlowRank] = []
    judge, start = SlowRanks(told.append), 0
    for windows, seconds in speeds:
        for _ in range(windows):
            judge.observe([
                WindowLoad(
                    start=start, tokens={}, iteration_s=9.0, copy_bytes_per_s=None, stage=stage,
                    own_s=own * WINDOW, iterations=WINDOW, node=f'n{stage}',
                )
                for stage, own in zip(STAGES, seconds, strict=True)
            ])  # fmt: skip
            start += WINDOW
    return told


EVEN = (1.0, 1.0, 1.0, 3.0, 3.1, 9.0)
"""Stages differ, and the last one has a single rank."""


def slowed(rank: int, times: float) -> list[float]:
    return [each * (times if one == rank else 1.0) for one, each in enumerate(EVEN)]


def test_even_ranks_of_uneven_stages_are_not_told() -> None:
    assert observed((50, EVEN)) == []


def test_slow_rank_is_told_once_and_when_it_is_over() -> None:
    start = (10, slowed(2, 1.5))
    (told,) = observed((10, EVEN), start)
    assert told == SlowRank(slow=2, node='n0', ratio=1.5, iterations=40)
    assert observed((10, EVEN), start, (50, slowed(2, 1.5))) == [told]
    _, over = observed((10, EVEN), start, (50, EVEN))
    assert over == SlowRank(slow=2, node='n0', ratio=1.0, iterations=0)


def test_one_of_two_ranks_of_a_stage_is_slow() -> None:
    assert [(one.slow, one.node) for one in observed((10, slowed(4, 1.4)))] == [(4, 'n1')]


def test_slow_rank_is_told_again_only_if_it_changes_much() -> None:
    """Not within the band that ends it, either."""
    found = observed(
        (10, slowed(0, 1.3)), (20, slowed(0, 1.4)), (20, slowed(0, 1.15)), (5, slowed(0, 2.0))
    )
    assert [(one.ratio, one.iterations) for one in found] == [(1.3, 40), (2.0, 220)]


def test_short_disturbances_are_not_told() -> None:
    """As a checkpoint to disk, or a collection of garbage; and a rank alone has no median."""
    short = (5, slowed(1, 4.0)), (5, EVEN)
    assert observed(*short, *short, *short, (20, slowed(5, 4.0))) == []
