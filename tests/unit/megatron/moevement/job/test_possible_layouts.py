# SPDX-License-Identifier: Apache-2.0
"""Layouts that cannot go on from windows of another one, and why not."""

from collections import Counter
from itertools import islice

import pytest
from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler

from megatron.moevement.job.possible_layouts import Bound, refuse
from moevement_ext.memory.window.placed import Layout
from moevement_ext.memory.window.refused import RefusedWindow

SAMPLES, BATCH, TWICE = 240, 24, 2


def dealt(ranks: int, consumed: int, iterations: int, sharded: bool) -> Counter[int]:
    """Samples that upstream gives to so many ranks in some iterations."""
    found: Counter[int] = Counter()
    for rank in range(ranks):
        sampler = MegatronPretrainingRandomSampler(
            range(SAMPLES), SAMPLES, consumed, TWICE, rank, ranks, sharded
        )
        for micro_batch in islice(sampler, iterations * BATCH // (ranks * TWICE)):
            found.update(micro_batch)
    return found


@pytest.mark.parametrize(('sharded', 'exact'), [(False, True), (True, False)])
def test_only_data_that_all_ranks_share_can_be_dealt_to_others(sharded: bool, exact: bool) -> None:
    """The reason for the refusal; a sample of one that is not exact is used twice."""
    through = dealt(4, 0, 3, sharded) + dealt(3, 3 * BATCH, 4, sharded)
    assert (through == dealt(4, 0, 7, sharded)) is exact
    assert (max(through.values()) == 1) is exact


def test_another_number_of_ranks_with_data_of_their_own_is_refused() -> None:
    own, shared = (Bound(interleaved=False, own_data=own) for own in (True, False))
    refuse(Layout(8, pipeline=2, data=4), Layout(4, data=4), own)
    refuse(Layout(4, data=4), Layout(3, data=3), shared)
    with pytest.raises(RefusedWindow, match='start with 4 data-parallel ranks, not 3'):
        refuse(Layout(4, data=4), Layout(3, data=3), own)


def test_another_division_of_tensors_is_refused() -> None:
    free, bound = (Bound(interleaved=interleaved, own_data=False) for interleaved in (False, True))
    with pytest.raises(RefusedWindow, match='start with --tensor-model-parallel-size 2, or export'):
        refuse(Layout(4, tensor=2), Layout(4, tensor=4), free)
    refuse(Layout(4, expert_tensor=2), Layout(4), free)
    with pytest.raises(RefusedWindow, match='start with --expert-tensor-parallel-size 2'):
        refuse(Layout(4, expert_tensor=2), Layout(4), bound)
