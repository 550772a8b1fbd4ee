# SPDX-License-Identifier: Apache-2.0
"""Floating point operations are counted from the samples, wherever the loop is entered."""

from megatron.moevement.job.megatron_loop import CountedOperations, OperationCount


def test_count_continues_from_the_base() -> None:
    asked: list[float] = []

    def per_sample() -> float:
        asked.append(2.5)
        return 2.5

    count = OperationCount(per_sample)
    count.base = CountedOperations(100, 1e6)
    assert count.at(100) == 1e6
    assert not asked, 'upstream cannot be asked before training begins'
    assert count.at(104) == 1e6 + 10
    count.base = CountedOperations(0, 0.0)
    assert count.at(4) == 10.0
    assert len(asked) == 1
