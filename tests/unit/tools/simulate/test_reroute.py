# SPDX-License-Identifier: Apache-2.0
"""Schedules of small pipelines that were computed by hand, and closed forms."""

import pytest

from tools.model.description import PRESETS
from tools.simulate.reroute import Job, MicroBatch, ends, job_of


@pytest.mark.parametrize(('stages', 'micro_batches'), [(1, 5), (2, 2), (4, 8), (8, 3)])
def test_pipeline_without_a_failure_has_the_bubble_of_1f1b(stages: int, micro_batches: int) -> None:
    busy, found = 3 * micro_batches, Job(2, 0, stages, micro_batches).rerouted(1)
    assert found / busy - 1 == pytest.approx((stages - 1) / micro_batches)


def test_without_a_pipeline_routes_and_guests_have_closed_forms() -> None:
    job = Job(4, 1, 1, 6)
    assert job.ratios() == [2.0, *[4 / 3] * 4]
    assert Job(4, 2, 1, 6).ratios() == [2.0] * 5


def test_two_stages_of_two_micro_batches_by_hand() -> None:
    """Rank 1 of unit 1 runs the forward passes of both units in 1 to 5, then the backward passes;
    the last one ends in 13, and that of stage 0 in 15. Split, gradients of inputs end in 9, those
    of stage 0 in 11, and gradients of weights in 13. A staggered iteration takes its 12 passes."""
    job = Job(2, 1, 2, 2)
    assert job.rerouted(1) == 15
    assert job.rerouted(1, split=True) == 13
    assert job.rerouted(1, split=True, iterations=3) == 12


def test_routes_run_the_pieces_in_turn_by_hand() -> None:
    """With one host the guest's part and its own. Of two hosts the second runs half of its own in 0
    to 9, as the first does with its piece, then its piece until 18, and the rest."""
    assert Job(2, 1, 2, 2).routes() == 9 + 9
    assert Job(3, 1, 2, 4).routes() == 9 + 9 + 9


def test_guest_waits_for_the_host_before_it() -> None:
    """The third has run 2 of its own in 9; its piece begins when that of the second ends, in 12."""
    assert Job(4, 1, 2, 3).routes() == 12 + 6 + 6


def test_without_another_unit_a_stage_has_two() -> None:
    """The ranks of stage 0 compute all of a pipeline of two."""
    assert Job(1, 1, 2, 4).ratios() == [3 * 2 * 4 / (3 * (4 + 1))]


def test_devices_have_room_for_twice_as_many_micro_batches_as_stages() -> None:
    """One stage: two forward passes, a backward pass, and then a forward pass again."""
    batches = [MicroBatch(order, (order, 0), [(0, 0)]) for order in range(3)]
    assert ends(batches, {}) == {(0, 0): 4, (1, 0): 7, (2, 0): 9}


@pytest.mark.parametrize('preset', sorted(PRESETS.keys() - {'deepseek-v3'}))
def test_more_of_recycle_is_never_slower_than_less(preset: str) -> None:
    job = job_of(PRESETS[preset])
    if job.lost == job.units:
        assert len(job.ratios()) == 1
        return
    guests, routes, alone, split, staggered = job.ratios()
    busiest = job.micro_batches * job.units / (job.units - job.lost)
    least = busiest / (job.micro_batches + job.stages - 1)
    assert least - 1e-9 <= staggered <= split <= alone <= guests < routes
    assert staggered == pytest.approx(least, rel=0.035)
