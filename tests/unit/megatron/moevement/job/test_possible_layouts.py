# SPDX-License-Identifier: Apache-2.0
"""Layouts that cannot continue from windows of another layout."""

from collections import Counter
from itertools import islice

import pytest
from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler

from megatron.moevement.job.possible_layouts import Bound, refuse
from moevement_ext.memory.window.placed import Layout
from moevement_ext.memory.window.refused import RefusedWindow

SAMPLES, BATCH, TWICE = 240, 24, 2


def dealt(ranks: int, consumed: int, iterations: int, sharded: bool) -> Counter[int]:
    """Samples that upstream gives to `ranks` ranks in some iterations."""
    found: Counter[int] = Counter()
    for rank in range(ranks):
        sampler = MegatronPretrainingRandomSampler(
            range(SAMPLES), SAMPLES, consumed, TWICE, rank, ranks, sharded
        )
        for micro_batch in islice(sampler, iterations * BATCH // (ranks * TWICE)):
            found.update(micro_batch)
    return found


@pytest.mark.parametrize(('sharded', 'exact'), [(False, True), (True, False)])
def test_only_shared_data_can_be_redistributed(sharded: bool, exact: bool) -> None:
    """The reason for the refusal: with sharded data, a sample is used twice."""
    through = dealt(4, 0, 3, sharded) + dealt(3, 3 * BATCH, 4, sharded)
    assert (through == dealt(4, 0, 7, sharded)) is exact
    assert (max(through.values()) == 1) is exact


def test_other_data_parallel_size_with_sharded_data_is_refused() -> None:
    own, shared = (Bound(interleaved=False, own_data=own) for own in (True, False))
    refuse(Layout(8, pipeline=2, data=4), Layout(4, data=4), own)
    refuse(Layout(4, data=4), Layout(3, data=3), shared)
    with pytest.raises(RefusedWindow, match='start with 4 data-parallel ranks, not 3'):
        refuse(Layout(4, data=4), Layout(3, data=3), own)


def test_other_tensor_parallel_size_is_refused() -> None:
    free, bound = (Bound(interleaved=interleaved, own_data=False) for interleaved in (False, True))
    with pytest.raises(RefusedWindow, match='start with --tensor-model-parallel-size 2, or export'):
        refuse(Layout(4, tensor=2), Layout(4, tensor=4), free)
    refuse(Layout(4, expert_tensor=2), Layout(4), free)
    with pytest.raises(RefusedWindow, match='start with --expert-tensor-parallel-size 2'):
        refuse(Layout(4, expert_tensor=2), Layout(4), bound)
