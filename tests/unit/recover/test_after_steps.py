# SPDX-License-Identifier: Apache-2.0
"""Which functions between two iterations run again after a recovery."""

from collections.abc import Sequence

import pytest

from moevement_ext.config import ConfigurationError
from moevement_ext.recover.after_steps import AfterSteps


class Cut(RuntimeError):
    """The waits of a collective were ended."""


class Rank:
    """One with two functions, after every second and every third iteration."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, int]] = []
        self.cut_after: int | None = None
        self.steps = AfterSteps(self.trust)
        for name, every in (('evaluate', 2), ('save', 3)):
            self.steps.add(every, lambda iteration, name=name: self.ran.append((name, iteration)))

    def trust(self) -> None:
        if len(self.ran) == self.cut_after:
            raise Cut

    def commit(self, iteration: int, cut_after: int | None = None) -> bytes:
        """Commit an iteration and run what is due; returns what others hear of it."""
        self.ran.clear()
        self.cut_after = cut_after
        self.steps.committed(iteration)
        try:
            self.steps.run(iteration)
        except Cut:
            self.cut_after = None
        return self.steps.hand_over()

    def recover(self, target: int, others: Sequence[bytes]) -> list[tuple[str, int]]:
        self.ran.clear()
        self.steps.enter(others)
        assert self.steps.finish_post_step(target, others, None)
        return self.ran


def test_functions_run_after_their_iterations() -> None:
    rank = Rank()
    for iteration in (1, 2, 3, 6):
        rank.commit(iteration)
        assert [one[0] for one in rank.ran] == {
            1: [], 2: ['evaluate'], 3: ['save'], 6: ['evaluate', 'save']
        }[iteration]  # fmt: skip
    rank.steps.run(6)
    assert len(rank.ran) == 2, 'not twice without a failure'


def test_what_some_rank_lacks_runs_on_all_ranks() -> None:
    done, cut, new = Rank(), Rank(), Rank()
    others = [done.commit(6), cut.commit(6, cut_after=2)]
    for rank in (done, cut, new):
        assert rank.recover(6, others) == [('save', 6)]
    assert new.recover(6, [one.steps.hand_over() for one in (done, cut)]) == []


def test_rank_that_has_not_committed_the_iteration_has_completed_nothing_after_it() -> None:
    """It was torn between its update and the others'."""
    ahead, behind = Rank(), Rank()
    others = [ahead.commit(6), behind.commit(5)]
    assert ahead.recover(6, others) == [('evaluate', 6), ('save', 6)]


def test_new_rank_knows_what_the_survivors_lacked_if_they_die_in_the_recovery() -> None:
    survivors = [Rank().commit(6, cut_after=1), Rank().commit(5)]
    new, newer = Rank(), Rank()
    new.steps.enter(survivors)
    assert newer.recover(6, [new.steps.hand_over()]) == [('evaluate', 6), ('save', 6)]


def test_wrong_interval_is_refused() -> None:
    with pytest.raises(ConfigurationError, match='every=0 must be at least 1'):
        AfterSteps(lambda: None).add(0, print)
